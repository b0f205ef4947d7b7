"""`async with cut_off_by(token) as cut`: a block that a cancellation of the token ends, in the task that runs it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from greenroom.runtime.cancel import CancelToken


class cut_off_by:  # noqa: N801  # reads as what it does, like asyncio.timeout
    """`happened`: whether the block was cut off. A cancellation of the task itself goes on as usual."""

    def __init__(self, token: CancelToken) -> None:
        self.happened = False
        self._token = token

    async def __aenter__(self) -> cut_off_by:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._task = task
        self._inside = True
        self._before = task.cancelling()
        self._forget = self._token.on_cancel(self._soon)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._inside = False
        self._forget()
        ours = self.happened and self._task.uncancel() <= self._before
        return ours and kind is not None and issubclass(kind, asyncio.CancelledError)

    def _soon(self) -> None:
        """From the loop, when the task waits inside the block: whoever cancels the token may be that very task."""
        asyncio.get_running_loop().call_soon(self._cut)

    def _cut(self) -> None:
        if self._inside:
            self.happened = True
            self._task.cancel()
