"""Lets obstore's threads finish before Python ends.

They hand each answer over while holding the interpreter, and still hold it for a moment after the answer has arrived. A
process that ends in that moment is aborted by Python before 3.14 (CPython issue 87135): all was written, but the exit
status is -6.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

LOOK_EVERY_S = 0.005
QUIET_LOOKS = 2
LONGEST_S = 1.0
_TASKS = Path("/proc/self/task")


@functools.cache  # once a process
def wait_at_exit() -> None:
    """Makes the end of this process wait, at most LONGEST_S, until tokio's threads are asleep."""
    atexit.register(_wait)


def _wait() -> None:
    quiet, end = 0, time.monotonic() + LONGEST_S
    while quiet < QUIET_LOOKS and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)  # gives the interpreter away: who waits for it is awake at the next look, or done
        quiet = quiet + 1 if _all_asleep() else 0


def _all_asleep() -> bool:
    """Whether no thread of tokio runs, as Linux tells; elsewhere nothing tells, and two looks must do."""
    for task in _TASKS.glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        if name.startswith("tokio") and not rest.startswith(" S"):
            return False
    return True
