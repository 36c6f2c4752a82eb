"""``pymux run``: programs that know nothing of pymux, and of the simulated device only what cudaMalloc gives."""

import subprocess
import sys

import pytest

from pymux.errors import ConfigError
from pymux.run import prepare
from tests.conftest import ROOT, hear, say


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with a program and the CUDA runtime that it is linked to."""
    d = tmp_path_factory.mktemp("cudart")
    for command in (
        [
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic-functions",
            "-Wl,-soname,libcudart.so.13",
            str(ROOT / "tests/cudart_stub.cpp"),
            "-o",
            "libcudart.so.13",
        ],
        [str(ROOT / "tests/cudart_program.cpp"), "./libcudart.so.13", "-Wl,-rpath,$ORIGIN", "-o", "program"],
    ):
        subprocess.run(["g++", "-std=c++20", *command], cwd=d, check=True)
    return d


def launch(node, built, *args, **env):
    command = [sys.executable, "-m", "pymux.cli", "run", "--job", "math", "--", str(built / "program"), *args]
    return node.launch(command, **env)


def end(p):
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0, err
    return out.split(), err


def test_cuda_malloc_comes_from_a_region_of_the_job(node, built):
    p = launch(node, built, "malloc", "10", "malloc", "4", "wait", "", "free", "10", "free", "4", "real", "")
    assert [hear(p), hear(p)] == ["0", "0"]
    (client,) = node.status()["clients"]
    assert (client["job"], client["pages_held"]) == ("math", 7)
    assert client["name"].startswith("run.")
    out, err = end_after_go(p)
    assert out == ["0", "0", "0"], "the runtime's own allocator was never called"
    assert err == ""
    node.until(lambda s: not s["clients"])


def end_after_go(p):
    say(p)
    return end(p)


def test_a_full_device_is_an_error_that_programs_know(node_factory, built):
    node = node_factory("16M")
    out, err = end(launch(node, built, "malloc", "12", "malloc", "8", "free", "12", "malloc", "9"))
    assert out == ["0", "2", "0", "0"]  # cudaErrorMemoryAllocation
    assert "pymux run: " in err


def test_what_is_left_alone_is_said_once(node, built):
    args = ["managed", "1", "managed", "2", "async", "1", "real", "", "free", "managed", "real", ""]
    out, err = end(launch(node, built, *args))
    assert out == ["0", "0", "0", "3", "0", "4"]
    assert err.count("cudaMallocManaged: that memory stays on the device") == 1
    assert err.count("cudaMallocAsync") == 1


def test_freeing_what_is_no_block_is_an_error(node, built):
    out, _ = end(launch(node, built, "malloc", "4", "inside", "4", "free", "4"))
    assert out == ["0", "1", "0"]  # cudaErrorInvalidValue


@pytest.mark.parametrize(("version", "says"), [("14000", "is of CUDA 13"), ("10020", "CUDA 11 or newer")])
def test_a_runtime_of_the_wrong_version_is_named(node, built, version, says):
    out, err = end(launch(node, built, "malloc", "4", "malloc", "4", STUB_VERSION=version))
    assert out == ["3", "3"]  # cudaErrorInitializationError
    assert err.count(str(built / "libcudart.so.13")) == 1
    assert says in err


def test_without_a_broker_it_says_why(node, built):
    node.runtime.mkdir(mode=0o700)
    (node.runtime / "broker.sock").mkdir()
    out, err = end(launch(node, built, "malloc", "4"))
    assert out == ["3"]
    assert "broker" in err


def test_programs_without_cuda_are_not_disturbed(node):
    command = [sys.executable, "-m", "pymux.cli", "run", "--", "sh", "-c", "echo $PYMUX_JOB; exit 3"]
    done = subprocess.run(command, env=node.env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "sh\n", "")
    assert not (node.runtime / "broker.sock").exists(), "nothing was connected"


def test_python_and_its_phases_share_the_programs_connection(node, built):
    code = """
import ctypes, os, sys
runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
program = ctypes.CDLL(None)
ptr = ctypes.c_void_p()
assert program.cudaMalloc(ctypes.byref(ptr), ctypes.c_size_t(6 << 20)) == 0
ctypes.memset(ptr, 5, 6 << 20)
import pymux
mux = pymux.connect("train")
region = mux.regions["default"]
assert region.contains(ptr.value)
assert mux.evict() == 6 << 20            # ends the lease that cudaMalloc took
with mux.phase("rollout"):
    assert ctypes.string_at(ptr, 6 << 20) == bytes([5]) * (6 << 20)
other = pymux.connect("train", name="other")
assert other.name == "other" and not other.regions
assert program.cudaFree(ptr) == 0
assert ctypes.c_int.in_dll(runtime, "cudart_stub_calls").value == 0
print(mux.name == f"run.{os.getpid()}", mux.job)
"""
    script = built / "train.py"
    script.write_text(code)
    command = [sys.executable, "-m", "pymux.cli", "run", sys.executable, str(script), str(built / "libcudart.so.13")]
    done = subprocess.run(command, env=node.env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True train\n"), done.stderr


def test_programs_that_cannot_be_served_are_named(tmp_path, monkeypatch):
    def why(*command):
        with pytest.raises(ConfigError) as e:
            prepare(command, None, {"PATH": "/usr/bin"})
        return str(e.value)

    assert "no such program" in why("no-such-program-here")
    source = 'const char* names[] = {"cudaErrorMemoryAllocation"}; int main() { return names[0][0] == 0; }'
    static = tmp_path / "static"
    subprocess.run(["g++", "-x", "c++", "-", "-o", static], input=source, text=True, check=True)
    assert str(static) in why(str(static))
    assert "-cudart shared" in why(str(static))
    setuid = tmp_path / "setuid"
    setuid.write_text("#!/bin/sh\n")
    setuid.chmod(0o4755)
    assert "changes its user" in why(str(setuid))
    foreign = tmp_path / "foreign"
    head = bytearray(static.read_bytes())
    head[18:20] = b"\xb7\x00"  # AArch64
    foreign.write_bytes(head)
    foreign.chmod(0o755)
    assert "another kind of processor" in why(str(foreign))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable_segments" in why("sh")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    _, environ = prepare(["sh"], "j", {"LD_PRELOAD": "/lib/libc.so.6", "PYMUX_JOB": "x"})
    assert environ["LD_PRELOAD"].endswith("libpymux_preload.so:/lib/libc.so.6")
    assert environ["PYMUX_JOB"] == "j"
    with pytest.raises(ConfigError, match="63 bytes"):
        prepare(["sh"], "j" * 64, {})
    _, environ = prepare(["sh", "train_math.py"], None, {})
    assert environ["PYMUX_JOB"] == "train_math"
