"""Scores answers in a subprocess with limits on time, memory, files and network.

Answers of a language model are untrusted: nothing of them runs in the job's own process. What it
is not: a boundary for hostile code in production; use containers or microVMs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

# Runs under ``python -I -S`` and reads {"latency", "cases": [[check, answer], ...]} on stdin.
_PROGRAM = r"""
import sys, json, resource, signal, time
request = json.load(sys.stdin)
time.sleep(request["latency"])
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # a user and a network namespace, where allowed
except OSError:
    pass
def too_long(*_):
    raise TimeoutError
signal.signal(signal.SIGXCPU, too_long)  # each second past the soft limit: that answer scores nothing
limits = (("CPU", 2, 8), ("AS", 512 << 20, 512 << 20), ("NOFILE", 16, 16), ("FSIZE", 0, 0), ("CORE", 0, 0))
for limit, soft, hard in limits:
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (soft, hard))
allowed = {"compile", "exec", "object.__getattr__", "code.__new__"}
def guard(event, args):
    if event not in allowed and not event.startswith(("sys.", "builtins.")):
        raise PermissionError("the sandbox does not allow " + event)
sys.addaudithook(guard)
scores = []
for check, answer in request["cases"]:
    try:
        scores.append(min(1.0, max(0.0, float(eval(check, {"answer": answer})))))
    except Exception:
        scores.append(0.0)
print(json.dumps(scores))
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed, not an answer in it."""


def score(cases: Sequence[tuple[str, str]], *, latency: float, timeout: float = 10.0) -> list[float]:
    """Run the checks in one sandbox.

    Args:
        cases: (source of an expression over ``answer``, the answer).
        latency: seconds that a sandbox takes to be there, such as a container's start or the way to
            a remote judge; waited inside it.
        timeout: seconds of wall time, beyond the latency.

    Returns:
        A score in [0, 1] for each case; 0 where the check failed or raised.

    Raises:
        SandboxError: it ended without scores, or did not end in time.
    """
    request = json.dumps({"latency": latency, "cases": list(cases)})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=request,
            capture_output=True,
            text=True,
            timeout=latency + timeout,
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired as e:
        raise SandboxError(f"the sandbox did not end within {e.timeout} s") from e
    if done.returncode != 0:
        raise SandboxError(f"the sandbox ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    scores: list[float] = json.loads(done.stdout)
    return scores
