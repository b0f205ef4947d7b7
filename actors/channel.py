"""Calls from one process to an actor: direct while few are under way, through a mailbox beyond.

A Ray call costs each end about a millisecond of CPU, whatever it carries. So further calls are pushed in batches, and
one long poll brings whatever has ended meanwhile, in the order of its ending: no call waits for another. A call is told
of the actor's death or silence as a direct one would be, and may then have been carried out: what goes through a
channel must bear being asked again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from greenroom.actors.calls import CALL_TIMEOUT, ActorSilent, ask
from greenroom.runtime.errors import ClusterError, GreenroomError

DIRECT = 8
"""Calls under way from here to one actor that go directly."""

TAKE_WAIT = 10.0
"""Seconds that a poll waits for the first result."""

BOX_KEPT = 120.0
"""Seconds without a poll after which a sender counts as gone."""

Call = tuple[int, str, tuple[Any, ...]]
"""Number, method, arguments."""

Result = tuple[int, Any, Exception | None]
"""Number of the call, its value, its error."""


@dataclass(slots=True)
class _Box:
    """What one sender has pushed and not yet taken; `first`: the position of the oldest result kept."""

    last: int = 0
    first: int = 0
    results: deque[Result] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0
    polled: float = field(default_factory=time.monotonic)


class Mailbox:
    """What makes an actor's methods reachable through a Channel; a base class, all on the actor's one event loop."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._boxes: dict[str, _Box] = {}
        self._handling: set[asyncio.Task[None]] = set()

    async def push(self, sender: str, calls: list[Call]) -> str:
        """Begins the calls, each once however often it is pushed; answers this mailbox's mark at once."""
        box = self._boxes.get(sender)
        if box is None:
            self._drop_lost()
            box = self._boxes[sender] = _Box()
        for number, method, args in calls:
            if number > box.last:
                box.last = number
                task = asyncio.get_running_loop().create_task(self._handle(box, number, method, args))
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)
        return self._mark

    async def take(self, sender: str, mark: str, position: int) -> tuple[str, list[Result]]:
        """The results from `position` on, those before it are dropped; waits a while for the first.

        With another mark than the one answered, what was pushed under it is not known here.
        """
        box = self._boxes.get(sender)
        if mark != self._mark or box is None:
            return self._mark, []
        while box.results and box.first < position:
            box.results.popleft()
            box.first += 1
        box.polls += 1
        try:
            async with asyncio.timeout(TAKE_WAIT):
                while not box.results:
                    box.news.clear()
                    await box.news.wait()
        except TimeoutError:
            pass
        finally:
            box.polls -= 1
            box.polled = time.monotonic()
        return self._mark, list(box.results)

    async def _handle(self, box: _Box, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            result: Result = (number, await getattr(self, method)(*args), None)
        except GreenroomError as error:
            result = (number, None, error)
        except Exception as error:  # a mistake of ours; as it is, it might not travel
            result = (number, None, ClusterError(f"{type(error).__name__} in {method} of an actor: {error}"))
        box.results.append(result)
        box.news.set()

    def _drop_lost(self) -> None:
        now = time.monotonic()
        lost = [name for name, box in self._boxes.items() if not box.polls and now - box.polled > BOX_KEPT]
        for name in lost:
            del self._boxes[name]


class Channel:
    """This process's way to one actor, which is a Mailbox; used on one event loop."""

    def __init__(self, handle: Any, direct: int = DIRECT) -> None:
        self._handle = handle
        self._direct = direct
        self._sender = uuid.uuid4().hex
        self._under_way = 0
        self._number = 0
        self._mark = ""
        self._position = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Call] = []
        self._pushing: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, timeout: float | None = CALL_TIMEOUT) -> Any:
        """The method's answer; raises its own error, ActorLost, or ActorSilent, also after `timeout` seconds."""
        self._under_way += 1
        try:
            if self._under_way <= self._direct:
                return await ask(getattr(self._handle, method).remote(*args), timeout)
            return await self._through_mailbox(method, args, timeout)
        finally:
            self._under_way -= 1

    async def _through_mailbox(self, method: str, args: tuple[Any, ...], timeout: float | None) -> Any:
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outbox.append((number, method, args))
        if self._pushing is None:
            self._pushing = asyncio.get_running_loop().create_task(self._push())
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError as error:
            raise ActorSilent(f"an actor does not answer {method} within {timeout:g} s") from error
        finally:
            self._waiting.pop(number, None)

    async def _push(self) -> None:
        """One batch at a time, so that the actor sees the calls in their order; the next gathers meanwhile."""
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                try:
                    mark = await ask(self._handle.push.remote(self._sender, batch))
                except ClusterError as error:
                    self._fail([number for number, _, _ in batch], error)
                    continue
                if mark != self._mark:
                    self._begin_anew(mark, batch[0][0])
                if self._taking is None:
                    self._taking = asyncio.get_running_loop().create_task(self._take())
        finally:
            self._pushing = None

    async def _take(self) -> None:
        """Polls for as long as somebody waits."""
        try:
            while self._waiting:
                before = self._mark
                try:
                    mark, results = await ask(self._handle.take.remote(self._sender, before, self._position))
                except ClusterError as error:
                    self._fail(list(self._waiting), error)
                    return
                if before != self._mark:
                    continue  # a push has found out meanwhile that the actor is another one
                if mark != before:
                    self._begin_anew(mark, self._number + 1)
                    continue
                self._position += len(results)
                for number, value, failure in results:
                    future = self._waiting.get(number)
                    if future is not None and not future.done():
                        future.set_result(value) if failure is None else future.set_exception(failure)
        finally:
            self._taking = None

    def _begin_anew(self, mark: str, number: int) -> None:
        """The actor began anew and knows no call before `number`."""
        self._mark, self._position = mark, 0
        self._fail([known for known in self._waiting if known < number], ActorSilent("an actor began anew"))

    def _fail(self, numbers: list[int], error: Exception) -> None:
        for number in numbers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_exception(error)
