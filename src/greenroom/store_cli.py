"""`greenroom store`: what a store honours, and what it holds for nobody."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from greenroom import console
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.storage.garbage import collect_garbage
from greenroom.runtime.storage.probe import probe_conditions
from greenroom.runtime.storage.session_store import SessionStore
from greenroom.runtime.storage.storage import Storage

app = typer.Typer(help="Look after a store.", no_args_is_help=True)

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="As in s3://bucket/prefix?endpoint=URL&region=NAME.")]


@app.command()
def check(url: UrlArgument) -> None:
    """Tries what sessions rest on and says whether the store can be used. Exit: 0 it can, 1 it cannot."""

    async def work() -> bool:
        storage = Storage.open(url)
        assert storage.objects is not None, "a URL always opens an object store"
        try:
            report = await probe_conditions(storage.objects)
        finally:
            await storage.close()
        for what, honoured in report.honours.items():
            console.out.print(f"[green]yes[/green] {what}" if honoured else f"[red]no [/red] {what}")
        console.out.print(f"[dim]a head write takes[/dim] {report.write_seconds * 1000:.1f} ms")
        verdict = (
            "[green]usable[/green]" if report.usable else "[red]not usable[/red]: sessions would not be safe on it"
        )
        console.out.print(verdict)
        return report.usable

    raise typer.Exit(0 if asyncio.run(work()) else 1)


@app.command()
def gc(
    url: UrlArgument,
    days: Annotated[float, typer.Option(help="Keep what was deleted within so many days.")] = 7.0,
) -> None:
    """Removes what deleted sessions left, and segments that no session refers to."""
    if days < 0:
        raise ConfigError(f"--days is {days}", hint="Give 0 or more")

    async def work() -> int:
        storage = Storage.open(url)
        try:
            assert isinstance(storage.checkpoints, SessionStore), "a URL always opens our own store"
            return await collect_garbage(storage.checkpoints, days * 86400, time.time())
        finally:
            await storage.close()

    console.out.print(f"{asyncio.run(work())} objects removed")
