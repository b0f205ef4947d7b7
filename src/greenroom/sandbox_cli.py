"""`greenroom sandbox`: what each kind of sandbox really holds on this machine."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.markup import escape

from greenroom import console
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.factory import KINDS
from greenroom.sandbox.probe import tables

app = typer.Typer(help="Look at the sandboxes of this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `check` a command of its own while it is the only one."""


@app.command()
def check(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Attacks each kind of sandbox from within and shows how far that came. Exit: 0 bubblewrap isolates, 1 it does not.

    Run it where the sandboxes run: on Ray, that is on the nodes.
    """
    found = asyncio.run(tables(KINDS))
    if as_json:
        document = {
            kind: str(checks)
            if isinstance(checks, SandboxUnavailable)
            else {check.name: {"holds": check.holds, "detail": check.detail} for check in checks}
            for kind, checks in found.items()
        }
        print(json.dumps(document))
    else:
        for kind, checks in found.items():
            console.out.print(f"[bold]{kind}[/bold]")
            if isinstance(checks, SandboxUnavailable):
                console.out.print(f"  [red]does not open[/red] {escape(str(checks))}", soft_wrap=True)
                continue
            for one in checks:
                mark = "[green]yes[/green]" if one.holds else "[red]no [/red]"
                detail = "" if one.holds else f" [dim]({escape(one.detail)})[/dim]"
                console.out.print(f"  {mark} {escape(one.meaning)}{detail}", soft_wrap=True)
    isolates = found["bubblewrap"]
    raise typer.Exit(0 if isinstance(isolates, list) and all(check.holds for check in isolates) else 1)
