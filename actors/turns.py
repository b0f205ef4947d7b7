"""Bounds on calls of a model that all processes of the pool share; kept by the Supervisor, on its loop alone.

Its memory: a Supervisor that had to begin anew does not know of the calls that were under way, so that for their length
there may be more than the bound.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from greenroom.runtime.calls import CallBounds

MAX_HOLD = 60.0
"""Seconds that one Retry-After can hold up the other calls."""


@dataclass(slots=True)
class _Line:
    """Those who wait for one endpoint, and those who have their turn; begins: when the next may have it."""

    bounds: CallBounds
    waiting: OrderedDict[str, asyncio.Future[None]] = field(default_factory=OrderedDict)
    holders: set[str] = field(default_factory=set)
    begins: float = 0.0
    alarm: asyncio.TimerHandle | None = None


class Turns:
    """Turns by ticket; asked for twice, a ticket is one turn."""

    def __init__(self) -> None:
        self._lines: dict[CallBounds, _Line] = {}
        self._tickets: dict[str, tuple[str, _Line]] = {}

    async def begin(self, ticket: str, owner: str, bounds: CallBounds) -> None:
        """Returns when it is the ticket's turn, in the order of asking; it lasts until `end`, or the owner's death."""
        if ticket not in self._tickets:
            line = self._lines.setdefault(bounds, _Line(bounds))
            self._tickets[ticket] = owner, line
            line.waiting[ticket] = asyncio.get_running_loop().create_future()
            self._pump(line)
        _, line = self._tickets[ticket]
        if ticket in line.waiting:
            await asyncio.shield(line.waiting[ticket])

    def end(self, ticket: str) -> None:
        """The turn is over, or not wanted any more."""
        if ticket in self._tickets:
            self._pump(self._remove(ticket))

    def drop(self, owner: str) -> None:
        """The owner is dead, with the calls that it had under way."""
        lost = [ticket for ticket, (had, _) in self._tickets.items() if had == owner]
        for line in [self._remove(ticket) for ticket in lost]:
            self._pump(line)

    def hold(self, bounds: CallBounds, seconds: float) -> None:
        """The endpoint asks for so much time before the next call."""
        line = self._lines.setdefault(bounds, _Line(bounds))
        line.begins = max(line.begins, self._now() + min(seconds, MAX_HOLD))
        self._pump(line)

    def _remove(self, ticket: str) -> _Line:
        _, line = self._tickets.pop(ticket)
        line.holders.discard(ticket)
        future = line.waiting.pop(ticket, None)
        if future is not None:
            future.cancel()
        return line

    def _pump(self, line: _Line) -> None:
        if line.alarm is not None:
            line.alarm.cancel()
            line.alarm = None
        most = line.bounds.max_concurrent
        while line.waiting and (most is None or len(line.holders) < most):
            now = self._now()
            if line.begins > now:
                break
            ticket, future = line.waiting.popitem(last=False)
            line.holders.add(ticket)
            if line.bounds.requests_per_minute is not None:
                line.begins = now + 60.0 / line.bounds.requests_per_minute
            if not future.done():
                future.set_result(None)
        if line.begins > self._now():
            line.alarm = asyncio.get_running_loop().call_at(line.begins, self._pump, line)
        elif not line.waiting and not line.holders:
            self._lines.pop(line.bounds, None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
