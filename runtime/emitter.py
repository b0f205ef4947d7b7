"""Emitter: turns what happens in one activation into events with cursors. Never raises, never waits."""

from __future__ import annotations

import asyncio
from typing import Any

from greenroom.runtime.events import Event, EventType
from greenroom.runtime.ports import Clock, EventSink


class Emitter:
    """Events of one session under one epoch; must be made on the event loop that it emits on."""

    def __init__(self, session_id: str, epoch: int, sink: EventSink, clock: Clock) -> None:
        self._session_id = session_id
        self._epoch = epoch
        self._sink = sink
        self._clock = clock
        self._count = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def emit(self, type: EventType, **data: Any) -> None:
        if self._closed:
            return
        self._count += 1
        self._sink.emit(Event(f"{self._epoch}.{self._count}", type, self._session_id, self._clock.time(), data))

    def close(self) -> None:
        """The run is over: what a tool that goes on has to say belongs to no run any more."""
        self._closed = True

    def progress(self, call_key: str) -> CallProgress:
        return CallProgress(self, self._loop, call_key)


class CallProgress:
    """ctx.progress: may be used from a tool's own thread."""

    __slots__ = ("_call_key", "_emitter", "_loop")

    def __init__(self, emitter: Emitter, loop: asyncio.AbstractEventLoop, call_key: str) -> None:
        self._emitter = emitter
        self._loop = loop
        self._call_key = call_key

    def emit_text(self, text: str) -> None:
        try:
            self._loop.call_soon_threadsafe(self._emit, text)
        except RuntimeError:
            pass  # the loop has ended; a thread that outlives its run has nobody to tell

    def _emit(self, text: str) -> None:
        self._emitter.emit("tool_progress", call_key=self._call_key, text=text)
