"""Command: one that a keeper runs, the Process of ports.py. It ends when its process does, not when its pipe closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from greenroom.runtime.calls import ExecResult
from greenroom.runtime.errors import SandboxDied
from greenroom.runtime.ports import Process
from greenroom.sandbox.pipe import OutputPipe

DRAIN = 0.1
"""Seconds to go on reading after the command has exited: what it wrote last may still be in the pipe."""


class Command:
    """`output`: its pipe; end_tree: ends all of its processes; timeout: seconds until that is done.

    What its keeper tells: `exited`: the exit code, a signal as a negative number; `gone`: nothing of its tree is left;
    `oom`: it was killed for its memory; `cwd`: the folder that its shell was in at last.
    """

    def __init__(
        self, output: OutputPipe, end_tree: Callable[[Command], Awaitable[None]], timeout: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.gone = asyncio.Event()
        self.oom = False
        self.cwd: str | None = None
        self.output = output
        self._end_tree = end_tree
        self._timed_out = False
        self._over = loop.create_task(self._until_over(timeout))

    async def wait(self, timeout: float | None = None) -> bool:
        await asyncio.wait([self._over], timeout=timeout)
        return self._over.done()

    async def news(self, timeout: float) -> None:
        if not self._over.done():
            told = asyncio.ensure_future(self.output.news.wait())
            await asyncio.wait([told, self._over], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()

    def take(self) -> tuple[str, int]:
        return self.output.take(final=self._over.done())

    def end(self) -> ExecResult | None:
        if not self._over.done():
            return None
        if self.oom:
            return ExecResult(status="oom")
        if self._timed_out:
            return ExecResult(status="timed_out")
        code = self.exited.result()
        if code < 0:
            return ExecResult(status="signaled", signal=-code)
        return ExecResult(status="exited", exit_code=code, cwd=self.cwd)

    async def kill(self) -> None:
        await self._end_tree(self)  # also of one that has ended: it may have left children
        self.lost("the command would not end")
        await asyncio.wait([self._over])

    def lost(self, why: str) -> None:
        """Nobody can say any more how it ended, unless that is known already."""
        if not self.exited.done():
            self.exited.set_exception(SandboxDied(why))

    async def _until_over(self, timeout: float | None) -> None:
        """To the command's end, and the end of what it wrote; a child that holds the pipe is read to nowhere then."""
        await asyncio.wait([self.exited], timeout=timeout)
        if not self.exited.done():
            self._timed_out = True
            await self._end_tree(self)
        await asyncio.wait([self.output.drained], timeout=DRAIN)
        self.output.leave(self.gone.is_set)
        if self.exited.done() and not self.exited.cancelled():
            self.exited.exception()  # looked at, also when nobody asks how it ended


async def run_to_end(command: Process) -> ExecResult:
    """How the command ended, with what it put out; cancelling kills its tree first."""
    try:
        await command.wait()
    except asyncio.CancelledError:
        await command.kill()
        raise
    end = command.end()
    assert end is not None, "a command that was waited for has ended"
    output, dropped = command.take()
    return end.but(output=output, dropped_bytes=dropped)
