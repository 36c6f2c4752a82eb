"""A forked child owns nothing of pymux: whatever it does ends at once, and the parent goes on."""

import os
import signal

import pytest

from tests.conftest import hear

BEGIN = """
import gc, signal, threading
mux = pymux.connect("a")
region = mux.region("w")
with mux.phase("init"):
    block = region.allocate(PAGE); fill(block, 1)
def wait(pid):
    began = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done: return os.waitstatus_to_exitcode(status)
        assert time.monotonic() - began < 60, "the child hangs"
        time.sleep(0.01)
def told(call):
    try: call()
    except pymux.LeaseError as e:
        assert "spawn" in str(e), e
        return
    raise SystemExit("nothing was raised")
"""
END = """
with mux.phase("after"): check(block, 1)
mux.evict()
with mux.phase("after"): check(block, 1)
assert mux.stats()["reconnects"] == 0
say("fine")
"""


@pytest.mark.parametrize(
    ("child", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('child')", 1),
        ("os.abort()", -signal.SIGABRT),
        ("os.execv(sys.executable, [sys.executable, '-c', 'print()'])", 0),
        ("del block, region, mux; gc.collect(); sys.exit(0)", 0),
        ("mux.close(); sys.exit(0)", 0),
        ("[told(c) for c in (mux.stats, mux.evict, mux.trim_host, mux.trace)]; sys.exit(0)", 0),
        ("told(lambda: region.allocate(5)); sys.exit(0)", 0),
        ("told(lambda: mux.phase('p').__enter__()); told(region.__enter__); sys.exit(0)", 0),
        ("told(lambda: pymux.connect('child')); sys.exit(0)", 0),
        ("told(lambda: pymux.connect('a')); sys.exit(0)", 0),
        ("told(lambda: region.read(block.ptr, bytearray(8))); told(lambda: mux.region('new')); sys.exit(0)", 0),
    ],
)
@pytest.mark.parametrize("where", ["outside", "in a phase", "while another thread waits"])
def test_a_child_ends_at_once_and_the_parent_keeps_what_it_has(node, child, code, where):
    run = f"""
pid = os.fork()
if pid == 0:
    sys.stderr = open(os.devnull, "w")
    {child}
assert wait(pid) == {code}, "the child's end"
"""
    if where == "in a phase":
        run = 'with mux.phase("open"):\n' + "".join(f"    {x}\n" for x in run.splitlines())
        run += "    check(block, 1)\n    assert mux.active\n"
    elif where == "while another thread waits":
        run = """
def other():
    with mux.phase("other"): pass
holder = mux.phase("held"); holder.__enter__()
t = threading.Thread(target=other); t.start()
while not mux._turns._queue: time.sleep(0.001)
""" + run + """
holder.__exit__(None, None, None)
t.join(60)
assert not t.is_alive()
"""  # fmt: skip
    # What the child raises passes through a handler of its own: the parent's code after it is not the child's.
    out = node.run(BEGIN + run + END)
    assert out.split() == ["fine"]


def test_a_child_of_a_program_that_has_only_imported_pymux_may_connect(node):
    out = node.run(
        """
pid = os.fork()
if pid == 0:
    with pymux.connect("child") as mux, mux.phase("p"): say("child")
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with pymux.connect("parent") as mux, mux.phase("p"): say("parent")
"""
    )
    assert out.split() == ["child", "parent"]


def test_a_killed_process_is_dead_though_a_child_that_it_forked_lives(node):
    """As of a trainer with a pool of workers for rewards: lease, pages, memory and places of the dead come back."""
    a = node.start(
        BEGIN
        + """
with mux.phase("fill"): more = region.allocate(20 * PAGE); fill(more, 2)
with mux.phase("share"): token = region.share()
pid = os.fork()
if pid == 0:
    time.sleep(600)
    os._exit(0)
say(pid)
with mux.phase("hold"):
    say("holds"); hear()
"""
    )
    worker = int(hear(a))
    try:
        assert hear(a) == "holds"
        b = node.start(
            """
mux = pymux.connect("b")
with mux.phase("p"):
    block = mux.region("w").allocate(30 * PAGE); fill(block, 5); say("has it")
again = pymux.connect("a")
say("again")
"""
        )
        node.until(lambda s: s["queue"])
        a.send_signal(signal.SIGKILL)
        a.wait()
        assert hear(b) == "has it"
        assert hear(b) == "again"
        os.kill(worker, 0)  # it lives all the while
    finally:
        os.kill(worker, signal.SIGKILL)


def test_pools_of_processes_work_beside_it(node):
    out = node.run(
        BEGIN
        + """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    with mux.phase("p"):
        say(sum(pool.map(abs, [-1, -2, -3])))
"""
        + END
    )
    assert out.split() == ["6", "fine"]
