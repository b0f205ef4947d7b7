"""Which sessions are cancelled, so that nothing below them begins any more. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")

KEPT = 4096
"""Cancelled sessions, and sessions whose parent is known, that are remembered; the oldest go first."""


class Tombstones:
    """A child that is asked for after its ancestor was cancelled is cancelled from the start."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str | None] = OrderedDict()
        self._parents: OrderedDict[str, str] = OrderedDict()

    def put(self, session_id: str, reason: str) -> None:
        """The session is cancelled, with all that is below it."""
        _keep(self._reasons, session_id, reason)

    def clear(self, session_id: str) -> None:
        """Somebody goes on with the session: what is above it does not count for what it begins from now on."""
        _keep(self._reasons, session_id, None)

    def know(self, session_id: str, parent: str) -> None:
        """Whose child the session is."""
        _keep(self._parents, session_id, parent)

    def over(self, session_id: str) -> str | None:
        """The reason why it, or an ancestor, is cancelled; the nearest one's."""
        current: str | None = session_id
        while current is not None:
            if current in self._reasons:
                return self._reasons[current]
            current = self._parents.get(current)
        return None


def _keep(known: OrderedDict[str, T], key: str, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > KEPT:
        known.popitem(last=False)
