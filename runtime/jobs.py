"""Background jobs of a sandbox: commands that outlived their call, by id, until somebody ends them or the sandbox ends.

A job's output is given out once, in order. What a call was given counts as taken only when the next call comes: one
that was ended before its result could be saved gives its part back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from greenroom.runtime.calls import ExecResult, JobState
from greenroom.runtime.errors import JobNotFound, SandboxError
from greenroom.runtime.ports import Process

MAX_JOBS = 32
"""Jobs of one sandbox that may run at once."""

KEPT_ENDED = 64
"""Jobs that have ended and can still be asked, the latest."""

MAX_WAIT = 60.0
"""Seconds that one look may wait for something new."""

NEWS_WAIT = 2.0
"""Seconds that a look waits for something new."""

MAX_GIVEN_BACK = 64 * 1024
"""Characters of output that were given out and came back; beyond it the oldest are dropped."""


@dataclass(slots=True)
class _Job:
    session_id: str
    process: Process
    given_to: str | None = None
    given: str = ""
    dropped: int = 0
    killed: bool = False
    end_was_told: bool = False


class Jobs:
    """`mark`: of the sandbox's incarnation; it is in every id, so that an old id never means a new job.

    asleep: jobs of earlier incarnations that were ended when the workspace was put to sleep.
    """

    def __init__(self, mark: str, asleep: Iterable[str] = ()) -> None:
        self._mark = mark
        self._asleep = frozenset(asleep)
        self._jobs: dict[str, _Job] = {}
        self._count = 0

    @property
    def running(self) -> bool:
        return any(_end_of(job.process) is None for job in self._jobs.values())

    @property
    def has_room(self) -> bool:
        return sum(_end_of(job.process) is None for job in self._jobs.values()) < MAX_JOBS

    def check_room(self) -> None:
        """Raises SandboxError when no further job may run."""
        if not self.has_room:
            raise SandboxError(f"{MAX_JOBS} background jobs are running", hint="End one with kill, or wait for one")

    def add(self, session_id: str, process: Process, key: str) -> JobState:
        """A command that goes on in the background; what it has put out so far goes to the call `key`."""
        self._count += 1
        id = f"job-{self._mark}-{self._count}"
        self._jobs[id] = _Job(session_id, process)
        ended = [id for id, job in self._jobs.items() if _end_of(job.process) is not None]
        ended.sort(key=lambda id: not self._jobs[id].end_was_told)  # those whose end somebody knows go first
        for old in ended[: max(0, len(ended) - KEPT_ENDED)]:
            del self._jobs[old]
        return self._look(id, key)

    async def check(self, id: str, key: str, wait: float | None) -> JobState:
        """What is new; raises JobNotFound.

        wait: seconds to wait for the job's end first. Then it waits a moment for something new, so that nobody who asks
        again and again has nothing to see.
        """
        job = self._find(id)
        if wait:
            await job.process.wait(min(wait, MAX_WAIT))
        if not job.given or job.given_to is not None:  # else there is something already: what came back
            await job.process.news(NEWS_WAIT)
        return self._look(id, key)

    async def kill(self, id: str, key: str) -> JobState:
        """Ends the job; one that has ended by itself keeps its own end. Raises JobNotFound."""
        await self._kill(self._find(id))
        return self._look(id, key)

    async def end_all_of(self, session_id: str) -> None:
        """Ends the jobs of a session, and what those that have ended left behind."""
        await asyncio.gather(*(self._kill(job) for job in self._jobs.values() if job.session_id == session_id))

    async def put_to_sleep(self) -> list[str]:
        """Ends every job; answers the ids of those that ran."""
        running = [id for id, job in self._jobs.items() if _end_of(job.process) is None]
        await asyncio.gather(*(self._kill(job) for job in self._jobs.values()))
        return running

    async def _kill(self, job: _Job) -> None:
        job.killed = job.killed or _end_of(job.process) is None
        await job.process.kill()  # also of one that has ended: it may have left children

    def process(self, id: str) -> Process:
        """What runs behind the id; raises JobNotFound."""
        return self._find(id).process

    def give_back(self, key: str) -> None:
        """The call was ended: what it was given goes to the next one that asks."""
        for job in self._jobs.values():
            if job.given_to == key:
                job.given_to = None

    def _look(self, id: str, key: str) -> JobState:
        job = self._find(id)
        text, dropped = job.process.take()
        if job.given_to not in (None, key):
            job.given, job.dropped = "", 0
        if len(job.given) > MAX_GIVEN_BACK:
            job.dropped += len(job.given) - MAX_GIVEN_BACK
            job.given = f"[... earlier output dropped ...]\n{job.given[-MAX_GIVEN_BACK:]}"
        job.given += text
        job.dropped += dropped
        job.given_to = key
        state = _state(id, job)
        job.end_was_told = state.status != "running"
        return state

    def _find(self, id: str) -> _Job:
        job = self._jobs.get(id)
        if job is None and id in self._asleep:
            raise JobNotFound(
                f"the background job {id!r} was ended when the workspace was put to sleep",
                hint="Start it again if it is still needed",
            )
        if job is None:
            raise JobNotFound(
                f"there is no background job {id!r}",
                hint="It was never started here, or ended with a sandbox that is gone",
            )
        return job


def _end_of(process: Process) -> ExecResult | None:
    """How it ended; None while it runs. One whose process was lost has ended too."""
    try:
        return process.end()
    except (OSError, SandboxError):
        return ExecResult(status="signaled")


def _state(id: str, job: _Job) -> JobState:
    end = _end_of(job.process)
    if end is None:
        return JobState(id=id, status="running", output=job.given, dropped_bytes=job.dropped)
    lost = end.status == "signaled" and end.signal is None
    status = "killed" if job.killed and end.status in ("signaled", "timed_out") else "lost" if lost else end.status
    return JobState(
        id=id,
        status=status,
        exit_code=end.exit_code,
        signal=end.signal,
        output=job.given,
        dropped_bytes=job.dropped,
    )
