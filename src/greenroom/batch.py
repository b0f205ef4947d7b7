"""Batches: a file of tasks, a file of results, each task exactly one result, however often the batch is broken off.

A task's session is named by the batch, the line's number and its content, and its run by one request id: started again,
it finds what is there, joins or resumes it, and never runs a finished task twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ConfigError, GreenroomError, RunFailed, UsageError
from greenroom.runtime.protocols import Runtime, Session
from greenroom.runtime.results import RunResult

REQUEST = "batch"
"""The request id of a task's one run."""

MAX_LINE = 16 * 1024 * 1024
"""Bytes of one task."""

MAX_SHOWN_PROBLEMS = 5


class Task(BaseModel):
    """One line of the tasks: what an agent is to do; `id` comes back with the result."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    task: Task
    session_id: str


@dataclass(slots=True)
class BatchReport:
    """What became of a batch: `total` tasks, `found` with a result already, `statuses` of those that ran now.

    problems: line number and text of tasks that could not be run; they have no result and are tried again.
    """

    total: int = 0
    found: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[int, str]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.found + sum(self.statuses.values()) + len(self.problems)


async def run_batch(
    runtime: Runtime,
    agent: AgentConfig,
    tasks: Path,
    out: Path,
    *,
    concurrency: int,
    name: str | None = None,
    told: Callable[[BatchReport], None] = lambda _: None,
) -> BatchReport:
    """Runs every task that has no result yet, `concurrency` at once, and appends each result as it comes.

    name: of the batch, else made of the names of both files; told: called after every result. Raises ConfigError for
    tasks that are none, before anything runs; UsageError while another process runs the batch.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}", hint="Give at least 1")
    batch = name or _name_of(tasks, out)
    report = BatchReport(total=_count(tasks))
    with _results(out) as (file, finished):
        report.found = len(finished)
        waiting = (line for line in _lines(tasks, batch) if line.session_id not in finished)
        async for line, made in _as_finished(runtime, agent, waiting, concurrency):
            if isinstance(made, RunResult):
                _append(file, line, made)
                report.statuses[str(made.status)] += 1
            else:
                report.problems.append((line.number, made))
            told(report)
    return report


async def _as_finished(
    runtime: Runtime, agent: AgentConfig, lines: Iterator[_Line], concurrency: int
) -> AsyncIterator[tuple[_Line, RunResult | str]]:
    """Each line with its result, or why it has none. Leaving early cancels what runs."""
    running: dict[asyncio.Task[RunResult | str], _Line] = {}
    try:
        while True:
            while len(running) < concurrency and (line := next(lines, None)) is not None:
                running[asyncio.ensure_future(_one(runtime, agent, line))] = line
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield running.pop(task), task.result()
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _one(runtime: Runtime, agent: AgentConfig, line: _Line) -> RunResult | str:
    session: Session | None = None
    try:
        session = await runtime.create_session(agent, line.session_id, request_id=line.session_id)
        info = await session.status()
        if info.state == "Interrupted" or info.owner is not None:
            resumed = await session.resume()
            if resumed is not None:
                return resumed
        return await session.run(line.task.prompt, request_id=REQUEST)
    except RunFailed as failed:
        return failed.result if not failed.resumable else str(failed)
    except GreenroomError as error:
        return f"{error.message}. {error.hint}" if error.hint else error.message
    except asyncio.CancelledError:
        if session is not None:
            await session.cancel("the batch was left")
        raise


# -- files


def _name_of(tasks: Path, out: Path) -> str:
    digest = hashlib.sha256(f"{tasks.resolve()}\n{out.resolve()}".encode()).hexdigest()[:8]
    return f"{tasks.stem[:40]}-{digest}"


def _raw_lines(tasks: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that say something, with their numbers from 1."""
    try:
        with tasks.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise ConfigError(f"{tasks} cannot be read: {error.strerror}", hint="Give a file with a task a line") from error


def _count(tasks: Path) -> int:
    """How many tasks there are; raises ConfigError naming the lines that are none."""
    count, problems = 0, []
    for number, line in _raw_lines(tasks):
        count += 1
        try:
            _parse(line)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f" (and {len(problems) - MAX_SHOWN_PROBLEMS} more)" if len(problems) > MAX_SHOWN_PROBLEMS else ""
        raise ConfigError(
            f"{tasks}: {'; '.join(problems[:MAX_SHOWN_PROBLEMS])}{more}",
            hint='Each line is {"prompt": "...", "id": "..."}; id may be left out. Nothing has run.',
        )
    if not count:
        raise ConfigError(f"{tasks} has no tasks", hint='Write a line like {"prompt": "..."} for each')
    return count


def _parse(line: bytes) -> Task:
    if len(line) > MAX_LINE:
        raise ValueError(f"it has {len(line)} bytes, more than {MAX_LINE}")
    try:
        return Task.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from None


def _lines(tasks: Path, batch: str) -> Iterator[_Line]:
    for number, line in _raw_lines(tasks):
        yield _Line(number, _parse(line), f"{batch}-{number}-{hashlib.sha256(line).hexdigest()[:8]}")


@contextmanager
def _results(out: Path) -> Iterator[tuple[IO[bytes], set[str]]]:
    """The file of results, for this process alone, and the sessions that have one; a torn last line is cut off."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a+b")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="Give another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another process is writing {out}", hint="Wait for it, or end it") from error
        yield file, _read_results(file, out)


def _read_results(file: IO[bytes], out: Path) -> set[str]:
    found: set[str] = set()
    file.seek(0)
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        end += len(line)
        try:
            found.add(json.loads(line)["session_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{out}: line {number} is no result of a batch", hint="Give --out a file of its own"
            ) from error
    file.seek(0, os.SEEK_END)
    return found


def _append(file: IO[bytes], line: _Line, result: RunResult) -> None:
    """Durable when it returns."""
    keys = ("session_id", "status", "text", "usage", "steps", "revision", "interrupt", "failure")
    shown = result.model_dump(mode="json")
    record: dict[str, Any] = {"line": line.number, "id": line.task.id, **{key: shown[key] for key in keys}}
    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
