"""Writes docs/states.md from the transition table: `python docs/make_states.py`."""

from __future__ import annotations

from pathlib import Path

from greenroom.runtime.machine import diagram

PAGE = """# The states of a session

Generated from the table in `runtime/machine.py` by `python docs/make_states.py`; a test holds the two together.

```mermaid
{diagram}```

A run begins in Ready, ends in Success, Fail, WaitingForUser or Interrupted (a *stop*), and is *in flight* in between.
Interrupted means that a run was cancelled and parked; WaitingForUser means that a call of it asks someone.
"""

if __name__ == "__main__":
    Path(__file__).with_name("states.md").write_text(PAGE.format(diagram=diagram()), encoding="utf-8")
