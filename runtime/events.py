"""What a watcher of a run sees, and the bounded buffer it reads from.

Events are for people and programs that look on; they decide nothing. A slow or absent reader never slows a run: the
buffer drops its oldest events and tells the reader how many it missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from greenroom.runtime.results import RunResult

EventType: TypeAlias = Literal[
    "run_started",
    "text",
    "thinking",
    "message",
    "tool_started",
    "tool_progress",
    "tool_finished",
    "retry",
    "reset",
    "child_started",
    "notice",
    "gap",
    "run_finished",
]
BUFFERED_EVENTS = 2048
"""Events kept per session and owner; a reader further behind gets a `gap`."""


@dataclass(frozen=True, slots=True)
class Event:
    """`id` is the cursor "{epoch}.{n}"; `time` Unix seconds; the fields of its type can be read as attributes."""

    id: str
    type: EventType
    session_id: str
    time: float
    data: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name != "data" and name in self.data:
            return self.data[name]
        raise AttributeError(f"an event of type {self.type!r} has no {name!r}")

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object: id, type, session_id, time and the fields of the type."""
        plain = {k: v.model_dump(mode="json") if hasattr(v, "model_dump") else v for k, v in self.data.items()}
        return {"id": self.id, "type": self.type, "session_id": self.session_id, "time": self.time, **plain}


def parse_cursor(cursor: str) -> tuple[int, int]:
    """(epoch, n) of an event id; raises ValueError."""
    epoch, _, number = cursor.partition(".")
    try:
        return int(epoch), int(number)
    except ValueError:
        raise ValueError(f"{cursor!r} is no event cursor: it reads EPOCH.NUMBER, as in 3.17") from None


class EventBuffer:
    """The latest events of one session, in order; many readers, one writer, one event loop."""

    def __init__(self, capacity: int = BUFFERED_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._first = 0  # position of the oldest kept event, counted from the first ever
        self._wakers: set[asyncio.Event] = set()

    def emit(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self._first += 1
        self._events.append(event)
        for waker in self._wakers:
            waker.set()

    @property
    def end(self) -> int:
        """Position after the newest event."""
        return self._first + len(self._events)

    def read(self, position: int) -> tuple[list[Event], int, int]:
        """Events from `position` on, the position after them, and how many were missed."""
        missed = max(0, self._first - position)
        start = max(position, self._first)
        return list(self._events)[start - self._first :], self.end, missed

    def position_after(self, cursor: str | None) -> int:
        """Where a reader that has seen `cursor` goes on; 0 for None. What it missed by then, `read` tells."""
        if cursor is None:
            return 0
        seen = parse_cursor(cursor)
        for offset, event in enumerate(self._events):
            at = parse_cursor(event.id)
            if at <= seen:
                continue
            if offset or at == (seen[0], seen[1] + 1):
                return self._first + offset
            return max(0, self._first - (at[1] - seen[1] - 1 if at[0] == seen[0] else self._first))
        return self.end

    async def wait(self, position: int) -> None:
        """Returns once there is something at `position` or beyond."""
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            while self.end <= position:
                waker.clear()
                await waker.wait()
        finally:
            self._wakers.discard(waker)

    def page(self, position: int) -> tuple[list[Event], int]:
        """As `read`, with a gap event where some were dropped."""
        events, following, missed = self.read(position)
        if missed and events:
            first = events[0]
            events.insert(0, Event(first.id, "gap", first.session_id, first.time, {"missed": missed}))
        return events, following

    async def follow(self, position: int = 0) -> AsyncIterator[Event]:
        """Every event from `position` on, for ever; a gap event where some were dropped."""
        while True:
            events, position = self.page(position)
            for event in events:
                yield event
            await self.wait(position)


async def follow_run(
    buffer: EventBuffer, position: int, request_id: str, run: asyncio.Task[RunResult]
) -> AsyncIterator[Event]:
    """The events of one run, from its run_started to its run_finished.

    Raises what refused the run; a run that failed ends like any other, and one answered from a receipt ends at once.
    """
    ours = False
    while True:
        events, position, missed = buffer.read(position)
        if missed and ours and events:
            yield Event(events[0].id, "gap", events[0].session_id, events[0].time, {"missed": missed})
        for event in events:
            ours = ours or (event.type == "run_started" and event.data.get("request_id") == request_id)
            if ours:
                yield event
            if ours and event.type == "run_finished":
                await asyncio.wait([run])
                _ = run.cancelled() or run.exception()  # looked at: its result was the last event
                return
        if buffer.end > position:
            continue
        if run.done():
            result = run.result()
            yield Event("0.0", "run_finished", result.session_id, 0.0, {"result": result})
            return
        news = asyncio.ensure_future(buffer.wait(position))
        try:
            await asyncio.wait([news, run], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
