"""A process of its own that outlives one that has stopped another: ``python -m pymux.guardian PID DRIVER``.

It waits for the end of the process that started it, and sets the stopped one going, if that is still needed.
"""

from __future__ import annotations

import contextlib
import signal
import sys

from pymux import _core
from pymux.errors import PymuxError
from pymux.guest import THAW_SECONDS, thaw


def main(pid: int, driver: str) -> None:
    """Wait for the end of standard input, then see to it that the process is not left stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this, and comes to its group
    _core.load_driver(driver)
    sys.stdin.buffer.read()
    with contextlib.suppress(PymuxError):
        thaw(pid, THAW_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
