"""CallGroup: tool calls that run at the same time, each in a task of its own, with a time limit, until all are over.

A call that is out of time, or whose run is cancelled, is cancelled and gets a moment to clean up; one that does not end
then is left behind, so that nothing a tool does can hold up its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.ports import Clock

CANCEL_GRACE = 5.0
"""Seconds a cancelled tool gets to clean up before the run goes on without it."""

HARD_GRACE = 0.1
"""Seconds it gets when the run is terminated."""

T = TypeVar("T")


class Early(Enum):
    """Why a call ended without a result."""

    out_of_time = "out_of_time"
    by_itself = "by_itself"
    """It was cancelled from inside, by the tool's own doing."""


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    task: asyncio.Task[T]
    out_of_time: bool = False
    over: bool = False
    forget_alarm: Callable[[], None] | None = None


class CallGroup(Generic[T]):
    """`cancel`: the run's token; time limits are measured on `clock`."""

    def __init__(self, clock: Clock, cancel: CancelToken) -> None:
        self._clock = clock
        self._cancel = cancel
        self._calls: dict[str, _Call[T]] = {}
        self._left = 0
        self._stopped = False
        self._waiting: asyncio.Future[None] | None = None

    def start(self, key: str, work: Coroutine[Any, Any, T], limit: float | None) -> None:
        """`limit`: seconds the call may take, None for no limit."""
        task = asyncio.get_running_loop().create_task(work)
        call = self._calls[key] = _Call(task)
        self._left += 1
        task.add_done_callback(partial(self._over, call))
        if limit is not None:
            call.forget_alarm = self._clock.call_later(limit, partial(self._out_of_time, call))

    def lift_limit(self, key: str) -> None:
        """The call itself is over; what is done with its result has no time limit."""
        call = self._calls[key]
        if call.forget_alarm is not None and not call.out_of_time:
            call.forget_alarm()
            call.forget_alarm = None

    async def join(self) -> bool:
        """True when all calls are over, False when the run was cancelled before."""
        if self._left and not self._cancel.cancelled:
            self._waiting = asyncio.get_running_loop().create_future()
            forget = self._cancel.on_cancel(self._wake)
            try:
                await self._waiting
            finally:
                forget()
        return not self._left

    async def stop(self) -> None:
        """Cancels what still runs; returns when it is over, or after the grace. A second time it returns at once."""
        if self._stopped:
            return
        self._stopped = True
        running = [call.task for call in self._calls.values() if not (call.over or call.task.done())]
        for call in self._calls.values():
            if call.forget_alarm is not None:
                call.forget_alarm()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=HARD_GRACE if self._cancel.hard else CANCEL_GRACE)

    def ended(self) -> list[tuple[str, T | Early]]:
        """What became of the calls that are over, in the order they were started; raises what one of them raised."""
        found: list[tuple[str, T | Early]] = []
        for key, call in self._calls.items():
            if call.out_of_time and call.over:
                found.append((key, Early.out_of_time))
            elif call.task.done() and not call.task.cancelled():
                found.append((key, call.task.result()))
            elif call.task.done() and not self._stopped:
                found.append((key, Early.by_itself))
        return found

    def _out_of_time(self, call: _Call[T]) -> None:
        call.out_of_time = True
        call.task.cancel()
        call.forget_alarm = self._clock.call_later(CANCEL_GRACE, partial(self._over, call, None))

    def _over(self, call: _Call[T], _task: asyncio.Task[T] | None) -> None:
        if call.over:
            return
        call.over = True
        if call.forget_alarm is not None:
            call.forget_alarm()
        self._left -= 1
        if not self._left:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
