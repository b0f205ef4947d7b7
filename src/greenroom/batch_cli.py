"""`greenroom batch`: many tasks from a file, each a session of its own."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from greenroom import console
from greenroom.agent_options import agent_for
from greenroom.batch import BatchReport, run_batch
from greenroom.bucket_files import batch_files
from greenroom.commands import JsonOption, LocalOption, StoreOption, finish, open_runtime, run_work
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.protocols import Runtime
from greenroom.settings import load_settings

app = typer.Typer(help="Run many tasks from a file.", no_args_is_help=True)

LOCAL_CONCURRENCY = 16
"""Sessions at once in one process, unless told otherwise."""

CANCELLED = 130
"""Exit code of a batch that the interrupt key has left."""

TOLD_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@app.callback()
def _group() -> None:
    """Run many tasks from a file."""


@app.command("run")
def batch_run(
    tasks: Annotated[
        str,
        typer.Argument(metavar="TASKS.jsonl", help='A task a line: {"prompt": ..., "id"?: ...}. A file, or s3://...'),
    ],
    out: Annotated[
        str,
        typer.Option("--out", metavar="RESULTS.jsonl", help="A result a line, as they finish. A file, or s3://..."),
    ],
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at once; default: as many as the pool lets live.")
    ] = None,
    pool_size: Annotated[
        int | None, typer.Option(min=1, help="Sessions that the pool lets live at once; default: by CPUs and memory.")
    ] = None,
    slot_resource: Annotated[
        str | None, typer.Option(metavar="NAME", help="The resource of Ray of which each session takes one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the batch; default: made of the files' names.")] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="FILE|MODULE:ATTR", help="The agent; default: the default tools.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="PROVIDER:NAME", help="As in openai:gpt-5.")] = None,
    store: StoreOption = None,
    sandbox: Annotated[str | None, typer.Option(metavar="NAME", help="host or bubblewrap.")] = None,
    as_json: JsonOption = False,
    local: LocalOption = False,
) -> None:
    """Run every task that has no result yet. Broken off, call it again: it goes on where it was.

    Exit: 0 every task has completed, 1 some have not, 2 usage.
    """
    settings = load_settings(agent=agent, model=model, sandbox=sandbox, store=store)

    async def work() -> BatchReport | None:
        config = agent_for(settings)
        if config is None:
            raise ConfigError("no model is named", hint="Give --model PROVIDER:NAME or --agent FILE, or set LLM_MODEL")
        async with batch_files(tasks, out) as files, _open(settings.store, local, pool_size, slot_resource) as runtime:
            at_once = concurrency or await _places(runtime)
            with _Shown(quiet=as_json) as shown:
                running = run_batch(
                    runtime,
                    config,
                    files.tasks,
                    files.out,
                    concurrency=at_once,
                    name=name or files.name,
                    told=shown.told,
                )
                return await _until_interrupted(asyncio.ensure_future(running))

    began = time.monotonic()
    report = run_work(work(), as_json=as_json)
    if report is None:
        console.err.print("[yellow]left[/yellow]; what ran is parked, call it again to go on")
        finish(CANCELLED)
        return
    _show(report, time.monotonic() - began, out, as_json=as_json)
    finish(0 if set(report.statuses) <= {"completed"} and not report.problems else 1)


def _open(
    store: str,
    local: bool,
    pool_size: int | None,
    slot_resource: str | None,  # as the options are
) -> AbstractAsyncContextManager[Runtime]:
    if pool_size is None and slot_resource is None:
        return open_runtime(store, local=local)
    if local:
        raise ConfigError("--local has no pool", hint="Leave out --pool-size and --slot-resource, or --local")
    from greenroom.actors.wire import PoolConfig

    return open_runtime(store, local=False, pool=PoolConfig(session_actors=pool_size, slot_resource=slot_resource))


async def _places(runtime: Runtime) -> int:
    status = getattr(runtime, "pool_status", None)
    return LOCAL_CONCURRENCY if status is None else int((await status()).size)


async def _until_interrupted(running: asyncio.Task[BatchReport]) -> BatchReport | None:
    """The report; None when the interrupt key has ended the batch, everything it ran parked."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Shown:
    """Progress: a bar on a terminal, else a line now and then; nothing with `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()
        self._last = self._began
        self._bar = Progress(
            TextColumn("[bold]{task.fields[told]}[/bold]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f}/s"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console.err,
            disable=quiet or not console.err.is_terminal,
        )
        self._task = self._bar.add_task("batch", total=None, told="batch", rate=0.0)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def told(self, report: BatchReport) -> None:
        now = time.monotonic()
        rate = (report.done - report.found) / max(now - self._began, 1e-6)
        told = "batch" if not report.problems else f"batch, {len(report.problems)} not run"
        self._bar.update(self._task, total=report.total, completed=report.done, rate=rate, told=told)
        if not self._quiet and not console.err.is_terminal and now - self._last > TOLD_EVERY:
            self._last = now
            left = (report.total - report.done) / max(rate, 1e-6)
            console.err.print(f"{report.done} of {report.total}, {rate:.1f}/s, {left:.0f} s left")


def _show(report: BatchReport, seconds: float, out: str, *, as_json: bool) -> None:
    if as_json:
        console.print_json(
            {
                "total": report.total,
                "found": report.found,
                "statuses": dict(report.statuses),
                "problems": [{"line": number, "message": text} for number, text in report.problems],
                "seconds": round(seconds, 3),
            }
        )
        return
    ran = sum(report.statuses.values())
    counts = ", ".join(f"{count} {status}" for status, count in sorted(report.statuses.items())) or "nothing to do"
    before = f", {report.found} found done" if report.found else ""
    console.err.print(f"{counts}{before}; {seconds:.1f} s, {ran / max(seconds, 1e-6):.1f}/s; results in {out}")
    for number, text in report.problems:
        console.err.print(f"[red]line {number} has not run:[/red] {escape(text)}")
