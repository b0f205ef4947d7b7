"""ToolTasks: a user's own tools that took longer than their window, and go on in this process as background jobs.

They are looked after by `check` and `kill` like a sandbox's commands, and told from those by their ids. Nothing of them
outlives the process: an id of an earlier one is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Any

from greenroom.runtime.calls import ExecResult, Interrupt, JobState, ToolOutput
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import JobNotFound
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

KEPT_SESSIONS = 1024
"""Sessions whose jobs are kept, beyond those that run something."""

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
        with contextlib.suppress(Exception):  # a tool's own callback may raise; its task is ended all the same
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
        if self._left_behind or self._task is None or not self._task.done() or self._task.cancelled():
            return None
        error = self._task.exception()
        if error is not None:
            return ToolOutput.of_text(clean(f"{type(error).__name__}: {error}"), is_error=True)
        made = self._task.result()
        if isinstance(made, Interrupt):
            return ToolOutput.of_text("It asked someone, which a job in the background cannot do.", is_error=True)
        return made


class ToolTasks:
    """Of one process, which is told by a mark in every id. Each session sees its own alone.

    outlive_runs: whether they go on after their run.
    """

    def __init__(self, ids: IdSource, clock: Clock, *, outlive_runs: bool) -> None:
        self.outlive_runs = outlive_runs
        self._clock = clock
        self._mark = f"{MARK}-{ids.new_id()[:8]}"
        self._sessions: OrderedDict[str, Jobs] = OrderedDict()
        self._count = 0

    def new(self, heard: Progress) -> ToolTask:
        """heard: what watches the tool's progress."""
        return ToolTask(self._clock, heard)

    async def run(
        self, task: ToolTask, work: Awaitable[Made], session_id: str, key: str, window: float, *, blocking: bool
    ) -> tuple[Made, str | None]:
        """What the tool gives within `window` seconds, or that it goes on, and the id of the job that it then is.

        A session with too many jobs waits for the end of this one. Raises what the tool raises. Cancelled meanwhile,
        it ends the tool first.
        """
        running = task.begin(work, blocking=blocking)
        try:
            over = await task.wait(window)
            jobs = self._of(session_id)
            if not over and not jobs.has_room:
                over = await task.wait()
        except asyncio.CancelledError:
            await task.kill()
            raise
        if over:
            return running.result(), None
        state = jobs.add(session_id, task, key)
        return job_output(state), state.id

    def owns(self, id: str) -> bool:
        """Whether the id is one of this or of an earlier process's tasks, not of a command in a sandbox."""
        return id.startswith(f"job-{MARK}-")

    def lost(self, ids: tuple[str, ...]) -> dict[str, bool]:
        """Those of the ids that were tasks of another process, each with False: this one cannot look after them."""
        return {id: False for id in ids if self._elsewhere(id)}

    async def check(self, session_id: str, id: str, key: str, wait: float | None) -> tuple[ToolOutput, bool]:
        """What is new and, at its end, the result; whether it still runs. Raises JobNotFound."""
        jobs = self._looked_up(session_id, id)
        try:
            return _shown(jobs, id, await jobs.check(id, key, wait))
        except asyncio.CancelledError:
            jobs.give_back(key)
            raise

    async def kill(self, session_id: str, id: str, key: str) -> tuple[ToolOutput, bool]:
        """Ends it; raises JobNotFound."""
        jobs = self._looked_up(session_id, id)
        return _shown(jobs, id, await jobs.kill(id, key))

    async def end_all_of(self, session_id: str) -> None:
        """Ends the tasks of a session, for good."""
        jobs = self._sessions.pop(session_id, None)
        if jobs is not None:
            await jobs.end_all_of(session_id)

    async def close(self) -> None:
        """Ends every task."""
        await asyncio.gather(*(self.end_all_of(session_id) for session_id in list(self._sessions)))

    def _of(self, session_id: str) -> Jobs:
        """The session's jobs; those of sessions that have not been seen for long, and run nothing, are forgotten."""
        jobs = self._sessions.get(session_id)
        if jobs is None:
            self._count += 1
            jobs = self._sessions[session_id] = Jobs(f"{self._mark}-{self._count}")
        self._sessions.move_to_end(session_id)
        idle = [sid for sid, kept in self._sessions.items() if not kept.running]
        for sid in idle[: max(0, len(self._sessions) - KEPT_SESSIONS)]:
            del self._sessions[sid]
        return jobs

    def _looked_up(self, session_id: str, id: str) -> Jobs:
        if self._elsewhere(id):
            raise JobNotFound(
                f"the background job {id!r} belonged to another process of this session",
                hint="It has ended with that process, unless that one still runs",
            )
        return self._of(session_id)

    def _elsewhere(self, id: str) -> bool:
        return self.owns(id) and not id.startswith(f"job-{self._mark}-")


def _shown(jobs: Jobs, id: str, state: JobState) -> tuple[ToolOutput, bool]:
    shown, running = job_output(state), state.status == "running"
    task = jobs.process(id)
    made = task.result() if isinstance(task, ToolTask) and not running else None
    if made is None:
        return shown, running
    text = plain_json({"id": id, "status": "failed" if made.is_error else "completed", "output": state.output})
    rest = tuple(block for block in made.content if not isinstance(block, TextBlock))
    result = f"{text[:-1]},{plain_json({'result': made.text})[1:]}"
    return made.but(content=(TextBlock(text=result), *rest)), running


def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
