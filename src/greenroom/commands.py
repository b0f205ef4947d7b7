"""What the commands share: their common options, the runtime they open, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from greenroom import console
from greenroom.embedded import AgentRuntime
from greenroom.runtime.errors import ClusterError
from greenroom.runtime.protocols import Runtime, Session
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.runtime.storage.storage import Storage

if TYPE_CHECKING:
    from greenroom.actors.wire import PoolConfig

EXIT_CODE = {
    RunStatus.completed: 0,
    RunStatus.failed: 1,
    RunStatus.suspended: 3,
    RunStatus.exhausted: 4,
    RunStatus.cancelled: 5,
}

T = TypeVar("T")

StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="sqlite:///FILE  [default: sqlite:///.greenroom/greenroom.db]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Run in this process, without Ray.")]


def run_work(work: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """Runs a command's work; where the output is to be one JSON object, nobody else writes to it meanwhile."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return asyncio.run(work)


@asynccontextmanager
async def open_storage(url: str) -> AsyncIterator[Storage]:
    storage = Storage.open(url)
    try:
        await storage.probe()
        yield storage
    finally:
        await storage.close()


@asynccontextmanager
async def open_runtime(url: str, *, local: bool, pool: PoolConfig | None = None) -> AsyncIterator[Runtime]:
    if local:
        async with AgentRuntime(url) as embedded:
            yield embedded
    else:
        from greenroom.actors.client import connect

        async with connect(storage=url, namespace=namespace_of(url), pool=pool) as on_ray:
            yield on_ray


@asynccontextmanager
async def attach(url: str, namespace: str) -> AsyncIterator[Runtime]:
    from greenroom.actors.client import connect

    async with connect(address="auto", storage=url, namespace=namespace) as runtime:
        yield runtime


async def where_it_runs(url: str, owner: str | None, session: str, verb: Callable[[Session], Awaitable[T]]) -> T:
    """The verb on the session's handle: on the Ray of its owner, or by the store alone when that is not there."""
    kind, namespace, _ = f"{owner or ''}::".split(":", 2)
    with contextlib.suppress(ClusterError):  # no Ray there: nobody runs it any more
        if kind == "ray":
            async with attach(url, namespace) as runtime:
                return await verb(await runtime.open(session))
    async with AgentRuntime(url) as embedded:
        return await verb(embedded.handle(session))


def namespace_of(url: str) -> str:
    """A pool serves one store: the command line gives each store a pool of its own on a Ray that many share."""
    return f"greenroom-{hashlib.sha256(Storage.open(url).url.encode()).hexdigest()[:12]}"


async def cancelling(handle: Session, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work; the first interrupt key cancels the run instead of this process."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    cancels: list[Awaitable[Any]] = []

    def interrupted() -> None:
        console.err.print("[yellow]cancelling …[/yellow]")
        cancels.append(loop.create_task(handle.cancel("interrupt key")))
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for cancel in cancels:
            await cancel


def show_text(result: RunResult, *, as_json: bool) -> None:
    if result.text and not as_json:
        console.out.print(result.text, markup=False)


def report(result: RunResult, *, as_json: bool, leave: bool = True) -> None:
    if as_json:
        print(console.result_json(result))
    else:
        console.show_end(result)
    if leave:
        finish(EXIT_CODE[result.status])


def report_or_nothing(result: RunResult | None, session: str, *, as_json: bool) -> None:
    if result is not None:
        report(result, as_json=as_json)
    elif as_json:
        console.print_json({"session_id": session, "status": None})
    else:
        console.err.print("nothing is in flight")


def finish(code: int) -> None:
    raise typer.Exit(code)
