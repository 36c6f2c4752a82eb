"""The import rules of the design, and other things that hold for the whole tree."""

import ast
import re

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "pymux"
SANS_IO = {
    "bank", "deadlocks", "dispatch", "estimator", "events", "hostbudget", "jobs", "lease", "members", "pages", "plan",
    "policy", "scheduler", "table",
}  # fmt: skip
PUBLIC = {"pymux", "pymux.integrations", "pymux.mux", "pymux.region", "pymux.errors", "pymux._core", "pymux.config"}


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
            if node.module == "pymux":
                found |= {f"pymux.{a.name}" for a in node.names if (PACKAGE / f"{a.name}.py").exists()}
    return found


@pytest.mark.parametrize("name", sorted(SANS_IO))
def test_the_core_imports_neither_io_nor_clocks_nor_the_rest(name):
    allowed = {
        "__future__",
        "collections.abc",
        "dataclasses",
        "enum",
        "graphlib",
        "heapq",
        "math",
        "typing",
        "pymux.errors",
    }
    allowed |= {f"pymux.{m}" for m in SANS_IO}
    assert imports(PACKAGE / f"{name}.py") <= allowed


def test_integrations_use_the_public_api_alone():
    for path in (PACKAGE / "integrations").glob("*.py"):
        inner = {m for m in imports(path) if m and m.startswith("pymux")}
        assert inner <= PUBLIC, path


def test_the_broker_never_imports_torch_or_the_mux():
    for name in ("broker", "nvml", "wire"):
        assert not imports(PACKAGE / f"{name}.py") & {"torch", "pymux.mux"}


def test_environment_variables_of_pymux_are_read_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "config.py":
            assert not re.search(r"environ(\.get\(|\[)\"?PYMUX", path.read_text()), path


def test_no_prints_outside_the_command_line_and_the_demo():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "cli.py" and "demo" not in path.parts:
            assert not re.search(r"^\s*print\(", path.read_text(), re.MULTILINE), path


def test_nothing_but_the_driver_table_calls_the_driver_or_knows_the_simulator():
    words = re.compile(r"cudasim|libcuda(?!rt)|PYMUX_SIM")
    for path in (ROOT / "csrc").glob("*.[ch]*"):
        if path.stem != "driver":
            assert not words.search(path.read_text()), path
    for path in PACKAGE.rglob("*.py"):
        if "demo" not in path.parts:
            assert not re.search(r"cudasim|libcuda\.so", path.read_text().replace("libcuda.so.1, or", "")), path


def test_every_driver_call_goes_through_the_table():
    call = re.compile(r"(?<![\w.>:&\"])cu(Mem|Ctx|Stream|Event|Device)[A-Z]\w*\(")
    for path in (ROOT / "csrc").glob("*.cpp"):
        text = re.sub(r"//.*|\"[^\"]*\"", "", path.read_text())
        assert not call.search(text), (path, call.search(text))


def test_the_extension_links_no_cuda_library():
    import subprocess

    from pymux import _core

    needed = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=False).stdout
    assert "NEEDED" in needed
    assert not re.search(r"NEEDED.*(libcuda|libcudart|libtorch)", needed)


def test_every_source_file_is_described_in_the_design():
    text = (ROOT / "csrc" / "DESIGN.md").read_text()
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        if path.suffix in {".h", ".cpp"}:
            assert f"`{path.relative_to(ROOT / 'csrc').with_suffix('')}`" in text, path


def test_the_broker_knows_how_the_store_of_swapped_out_pages_grows():
    from pymux.hostbudget import HOST_CHUNK

    assert f"kSlotsPerChunk = {HOST_CHUNK};" in (ROOT / "csrc" / "backing.h").read_text()


def test_environment_variables_are_listed_in_the_readme():
    text = (ROOT / "README.md").read_text()
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc" / "sim").glob("*.cpp")]
    names = {n for p in sources for n in re.findall(r"PYMUX_[A-Z_]+[A-Z]", p.read_text())}
    assert {n for n in names if f"`{n}`" not in text} == set()


def test_the_tests_that_the_page_of_failures_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failures.md").read_text()))
    there = {
        n
        for p in (ROOT / "tests").glob("test_*.py")
        for n in re.findall(r"^def (test_\w+)", p.read_text(), re.MULTILINE)
    }
    assert named - there == set()
