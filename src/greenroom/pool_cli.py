"""`greenroom pool`: the warm actors of a store on a running Ray, and their end. Never starts Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from greenroom import console
from greenroom.commands import JsonOption, StoreOption, namespace_of
from greenroom.runtime.errors import ClusterError
from greenroom.settings import load_settings

app = typer.Typer(help="Look at the pool of actors, and end it.", no_args_is_help=True)

NamespaceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of the pool; default: the one that this command line uses for it.")
]


@app.command("status")
def pool_status(store: StoreOption = None, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Show the pool: its processes, what runs, what waits."""
    from greenroom.actors.cluster import find_pool

    async def work() -> None:
        supervisor = find_pool(namespace or namespace_of(load_settings(store=store).store))
        status = None if supervisor is None else await supervisor.status()
        if as_json:
            console.print_json({"pool": None if status is None else dataclasses.asdict(status)})
        elif status is None:
            console.err.print("[dim]there is no pool[/dim]")
        else:
            console.show_pool(status)

    asyncio.run(work())


@app.command("stop")
def pool_stop(store: StoreOption = None, namespace: NamespaceOption = None) -> None:
    """End the pool: what runs is parked, its processes end. Sessions lie in the store."""
    from greenroom.actors.cluster import find_pool

    async def work() -> None:
        supervisor = find_pool(namespace or namespace_of(load_settings(store=store).store))
        if supervisor is None:
            console.err.print("[dim]there is no pool[/dim]")
            return
        try:
            await supervisor.stop()
        except ClusterError as error:
            console.err.print(f"[yellow]{escape(error.message)}[/yellow]")
        console.err.print("the pool has ended")

    asyncio.run(work())
