"""Processes that know nothing of pymux, shared as a whole: never left stopped, never with other contents."""

import os
import signal
import sys
import time

import pytest

from tests.conftest import hear, say

# Uses the simulated device by its driver calls alone, as a CUDA program does: reads and writes by copies.
GUEST = """
from pymux import _core
cu = ctypes.CDLL(_core.load_driver("sim"))
u64, size_t = ctypes.c_uint64, ctypes.c_size_t
context, ptr, nbytes = ctypes.c_void_p(), u64(), int(os.environ["MIB"]) * MIB
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(ctypes.byref(ptr), size_t(nbytes)) == 0
host = (ctypes.c_char * nbytes)()
address = ptr.value
count = 0
def step():
    global count
    if count:
        assert cu.cuMemcpyDtoH_v2(host, ptr, size_t(nbytes)) == 0
        assert bytes(host[:4096]) == bytes([count % 256]) * 4096 and host[nbytes - 1] == bytes([count % 256])
    count += 1
    assert cu.cuMemsetD8_v2(ptr, ctypes.c_ubyte(count % 256), size_t(nbytes)) == 0
step()
say(os.getpid())
if "FREE" in os.environ:  # computes all the time
    end = time.monotonic() + float(os.environ["FREE"])
    while time.monotonic() < end:
        step()
        time.sleep(0.002)
    say(count)
for order in iter(hear, ""):
    if order == "export":
        handle, prop = u64(), None
    step()
    say(count)
"""

HOST = """
guest = pymux.opaque(int(os.environ["GUEST"]), job="legacy", lock_timeout=float(os.environ.get("LOCK", 5)))
say(f"{guest.nbytes // MIB} {guest.state}")
for order in iter(hear, ""):
    try:
        if order == "phase":
            with guest.phase():
                say(guest.state)
                hear()
            say(guest.state)
        elif order == "state":
            say(guest.state)
        elif order == "close":
            guest.close()
            say(guest.state)
        elif order == "fail":
            from pymux import _core
            name, code = hear().split()
            ctypes.CDLL(_core.load_driver("sim")).cudasim_fail_nth(name.encode(), ctypes.c_long(1), int(code), 0)
            say("armed")
    except pymux.PymuxError as e:
        say(f"{type(e).__name__}: {e}")
"""

OTHER = """
mux = pymux.connect("other")
region = mux.region("weights")
with mux.phase("init"):
    block = region.allocate(int(os.environ["PAGES"]) * PAGE)
    fill(block, 9)
say("ready")
for order in iter(hear, ""):
    with mux.phase("train"):
        check(block, 9)
        say("running")
        hear()
    say("left")
"""


def guest(node, mib=24, **env):
    p = node.start(GUEST, MIB=str(mib), **env)
    return p, hear(p)


def order(p, text):
    say(p, text)
    return hear(p)


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_that_do_not_fit_take_turns(node_factory):
    node = node_factory("40M")
    g, pid = guest(node, 24)
    host = node.start(HOST, GUEST=pid)
    assert hear(host) == "24 checkpointed"
    other = node.start(OTHER, PAGES="12")
    assert hear(other) == "ready"
    for turn in range(2, 5):
        assert order(host, "phase") == "running"
        assert order(g, "step") == str(turn)
        assert order(host, "end") == "locked", "it stays on the device until somebody wants that"
        assert order(other, "phase") == "running"
        assert order(host, "state") == "checkpointed"
        assert order(other, "end") == "left"
    assert order(host, "close") == "running"
    assert order(g, "step") == "5"


def test_when_nobody_wants_the_device_nothing_moves(node):
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    assert hear(host) == "24 checkpointed"
    for turn in (2, 3, 4):
        assert order(host, "phase") == "running"
        assert order(g, "step") == str(turn)
        assert order(host, "end") == "locked"


def test_outside_of_its_phases_it_does_not_run(node):
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    hear(host)
    order(host, "phase")
    order(host, "end")
    say(g, "step")
    time.sleep(0.3)
    import select

    assert not select.select([g.stdout], [], [], 0)[0], "its call waits"
    assert order(host, "phase") == "running"
    assert hear(g) == "2"


@pytest.mark.parametrize("when", ["checkpointed", "locked"])
def test_the_death_of_its_host_sets_it_going(node, when):
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    hear(host)
    if when == "locked":
        order(host, "phase")
        assert order(host, "end") == when
    assert order(host, "state") == when
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert order(g, "step") == "2"


def test_its_own_death_gives_the_device_back(node_factory):
    node = node_factory("40M")
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    hear(host)
    assert order(host, "phase") == "running"
    g.send_signal(signal.SIGKILL)
    g.wait()
    assert order(host, "end").startswith("DriverError")
    other = node.start(OTHER, PAGES="12")
    assert hear(other) == "ready"


@pytest.mark.parametrize(("call", "code"), [("cuCheckpointProcessLock", 600), ("cuCheckpointProcessCheckpoint", 999)])
def test_what_cannot_be_taken_over_runs_on(node, call, code):
    g, pid = guest(node)
    p = node.start(
        f"""
from pymux import _core
ctypes.CDLL(_core.load_driver("sim")).cudasim_fail_nth(b"{call}", ctypes.c_long(1), {code}, 0)
try:
    pymux.opaque({pid}, job="legacy")
except pymux.CudaError as e:
    say(e.call)
"""
    )
    assert hear(p) == call
    assert order(g, "step") == "2"


def test_a_failed_checkpoint_leaves_it_running_with_the_device_and_is_tried_again(node_factory):
    node = node_factory("40M")
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    hear(host)
    other = node.start(OTHER, PAGES="12")
    assert hear(other) == "ready"
    order(host, "phase")
    order(host, "end")
    say(host, "fail")
    assert order(host, "cuCheckpointProcessCheckpoint 999") == "armed"
    say(other, "phase")
    assert order(g, "step") == "2", "unlocked after the failure"
    assert hear(other) == "running"
    assert order(host, "state") == "checkpointed"


def test_a_failed_restore_keeps_its_contents_for_the_next_try(node):
    g, pid = guest(node)
    host = node.start(HOST, GUEST=pid)
    hear(host)
    say(host, "fail")
    order(host, "cuCheckpointProcessRestore 999")
    assert order(host, "phase").startswith("CudaError")
    assert order(host, "state") == "checkpointed"
    assert order(host, "phase") == "running"
    assert order(g, "step") == "2"


def test_memory_shared_with_others_cannot_be_checkpointed(node):
    owner = node.start(OTHER, PAGES="2")  # passes its pages on
    assert hear(owner) == "ready"
    pid = owner.pid
    second = node.start(OTHER.replace('"other"', '"second"'), PAGES="31")
    assert hear(second) == "ready"  # has taken pages from the first
    assert order(second, "phase") == "running"
    out = node.start(f"""
try:
    pymux.opaque({second.pid}, job="legacy", lock_timeout=0.5)
except pymux.PymuxError as e:
    say(f"{{type(e).__name__}}: {{e}}")
""")
    del pid
    say(second, "end")
    assert hear(out).startswith("CudaError")
    assert hear(second) == "left"
    assert order(second, "phase") == "running"


def test_who_is_no_cuda_process(node):
    out = node.run(f"""
for pid in ({os.getpid()}, 2 ** 22 + 1):
    try:
        pymux.opaque(pid)
    except pymux.DriverError as e:
        say(e)
""")
    assert out.count("is no CUDA process of this user") == 2


def test_the_command_shares_it_until_it_ends(node_factory):
    node = node_factory("40M")
    g, pid = guest(node, FREE="3")
    command = [sys.executable, "-m", "pymux.cli", "opaque", pid, "--slice", "0.3"]
    p = node.launch(command)
    assert "24 MiB" in hear(p)
    other = node.start(OTHER, PAGES="12")
    assert hear(other) == "ready"
    turns = 0
    while g.poll() is None and turns < 4:
        assert order(other, "phase") == "running"
        time.sleep(0.1)
        assert order(other, "end") == "left"
        turns += 1
    assert int(hear(g)) > 20
    g.stdin.close()
    g.wait()
    assert p.wait(20) == 0, p.stderr.read()
