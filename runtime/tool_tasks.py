"""ToolTasks: a user's own tools that took longer than their window, and go on in this process as background jobs.

They are looked after by `check` and `kill` like a sandbox's commands, and told from those by their ids. Nothing of them
outlives the process: an id of an earlier one is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from greenroom.runtime.calls import ExecResult, Interrupt, JobState, ToolOutput
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.jobs import Jobs
from greenroom.runtime.messages import TextBlock, clean
from greenroom.runtime.ports import Clock, IdSource, Progress
from greenroom.runtime.tools.builtin import job_output
from greenroom.runtime.tools.output import plain_json

MARK = "here"
MAX_PROGRESS = 64 * 1024
"""Characters of a task's progress that are kept until somebody looks; beyond it the oldest are dropped."""

KILL_GRACE = 5.0
"""Seconds that a killed task gets to clean up before it is left behind."""

STILL_THERE = "\n[it was told to stop and has not ended yet; what it gives is dropped]"

Made = ToolOutput | Interrupt


class ToolTask:
    """One tool at work: a Process whose output is its progress, and whose end has a result."""

    def __init__(self, clock: Clock, heard: Progress) -> None:
        self.cancel = CancelToken(monotonic=clock.monotonic)
        self._clock = clock
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Made] | None = None
        self._text = ""
        self._dropped = 0
        self._news = asyncio.Event()
        self._blocking = False
        self._left_behind = False

    def begin(self, work: Awaitable[Made], *, blocking: bool) -> asyncio.Task[Made]:
        """blocking: it is a plain function in a thread, which nothing ends but itself."""
        self._blocking = blocking
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(lambda _: self._news.set())
        return self._task

    def emit_text(self, text: str) -> None:
        """ctx.progress of the tool, from any thread: for those who watch, and for the next look."""
        self._heard.emit_text(text)
        try:
            self._loop.call_soon_threadsafe(self._put, clean(text))
        except RuntimeError:
            pass  # the loop has ended

    def _put(self, text: str) -> None:
        self._text += text
        over = len(self._text) - MAX_PROGRESS
        if over > 0:
            self._dropped += over
            self._text = self._text[over:]
        self._news.set()

    @property
    def _over(self) -> bool:
        return self._left_behind or (self._task is not None and self._task.done())

    async def wait(self, timeout: float | None = None) -> bool:
        if not self._over and self._task is not None:
            await self._within(timeout, asyncio.wait([self._task]))
        return self._over

    async def news(self, timeout: float) -> None:
        if not (self._text or self._over):
            self._news.clear()
            await self._within(timeout, self._news.wait())

    async def _within(self, timeout: float | None, waiting: Awaitable[Any]) -> None:
        """Waits for it, so many seconds of the clock at most."""
        task = asyncio.ensure_future(waiting)
        forget = None if timeout is None else self._clock.call_later(timeout, lambda: _end(task))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            if forget is not None:
                forget()

    def take(self) -> tuple[str, int]:
        text, dropped = self._text, self._dropped
        self._text, self._dropped = "", 0
        return text, dropped

    def end(self) -> ExecResult | None:
        if not self._over:
            return None
        if self._left_behind or self._task is None or self._task.cancelled():
            return ExecResult(status="signaled", signal=15)
        return ExecResult(status="exited", exit_code=None)

    async def kill(self) -> None:
        self.cancel.cancel("killed")
        if self._task is not None and not self._task.done():
            if not self._blocking:
                self._task.cancel()
            await self._within(KILL_GRACE, asyncio.wait([self._task]))
        if not self._over:
            self._left_behind = True
            self._put(STILL_THERE)

    def result(self) -> ToolOutput | None:
        """What the tool gave, or why it gave nothing; None while it runs or if it was killed."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        error = self._task.exception()
        if error is not None:
            return ToolOutput.of_text(clean(f"{type(error).__name__}: {error}"), is_error=True)
        made = self._task.result()
        if isinstance(made, Interrupt):
            return ToolOutput.of_text("It asked someone, which a job in the background cannot do.", is_error=True)
        return made


class ToolTasks:
    """Of one process, which is told by a mark in every id. outlive_runs: whether they go on after their run."""

    def __init__(self, ids: IdSource, clock: Clock, *, outlive_runs: bool) -> None:
        mark = ids.new_id()[:8]
        self.outlive_runs = outlive_runs
        self._clock = clock
        self._prefix = f"job-{MARK}-{mark}-"
        self._jobs = Jobs(f"{MARK}-{mark}")

    def new(self, heard: Progress) -> ToolTask:
        """heard: what watches the tool's progress. Raises SandboxError when there are too many jobs."""
        self._jobs.check_room()
        return ToolTask(self._clock, heard)

    async def run(
        self, task: ToolTask, work: Awaitable[Made], session_id: str, key: str, window: float, *, blocking: bool
    ) -> tuple[Made, str | None]:
        """What the tool gives within `window` seconds, or that it goes on, and the id of the job that it then is.

        Raises what the tool raises. Cancelled meanwhile, it ends the tool first.
        """
        running = task.begin(work, blocking=blocking)
        try:
            over = await task.wait(window)
        except asyncio.CancelledError:
            await task.kill()
            raise
        if over:
            return running.result(), None
        state = self._jobs.add(session_id, task, key)
        return job_output(state), state.id

    def owns(self, id: str) -> bool:
        """Whether the id is one of this or of an earlier process's tasks, not of a command in a sandbox."""
        return id.startswith(f"job-{MARK}-")

    def lost(self, ids: tuple[str, ...]) -> dict[str, bool]:
        """Those of the ids that were tasks of an earlier process, each with False: none of them runs."""
        return {id: False for id in ids if self.owns(id) and not id.startswith(self._prefix)}

    async def check(self, id: str, key: str, wait: float | None) -> tuple[ToolOutput, bool]:
        """What is new and, at its end, the result; whether it still runs. Raises JobNotFound."""
        try:
            return self._shown(id, await self._jobs.check(id, key, wait))
        except asyncio.CancelledError:
            self._jobs.give_back(key)
            raise

    async def kill(self, id: str, key: str) -> tuple[ToolOutput, bool]:
        """Ends it; raises JobNotFound."""
        return self._shown(id, await self._jobs.kill(id, key))

    def _shown(self, id: str, state: JobState) -> tuple[ToolOutput, bool]:
        shown, running = job_output(state), state.status == "running"
        task = self._jobs.process(id)
        made = task.result() if isinstance(task, ToolTask) and not running else None
        if made is None:
            return shown, running
        text = plain_json({"id": id, "status": "failed" if made.is_error else "completed", "output": state.output})
        rest = tuple(block for block in made.content if not isinstance(block, TextBlock))
        result = f"{text[:-1]},{plain_json({'result': made.text})[1:]}"
        return made.but(content=(TextBlock(text=result), *rest)), running

    async def end_all_of(self, session_id: str) -> None:
        """Ends the tasks of a session."""
        await self._jobs.end_all_of(session_id)

    async def close(self) -> None:
        """Ends every task."""
        await self._jobs.put_to_sleep()


def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
