"""`greenroom session`: look at sessions and go on with them.

list, show, and cancel of a session that nobody runs touch the store alone; a session that runs on Ray is reached there.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from greenroom import console
from greenroom.commands import (
    JsonOption,
    LocalOption,
    StoreOption,
    cancelling,
    open_runtime,
    open_storage,
    report,
    report_or_nothing,
    run_work,
    show_text,
    where_it_runs,
)
from greenroom.runtime.errors import UnknownInterrupt
from greenroom.runtime.results import RunResult
from greenroom.runtime.sessions import list_sessions, read_head, read_transcript, read_tree
from greenroom.runtime.verbs import may_park
from greenroom.runtime.view import info_of
from greenroom.settings import load_settings

app = typer.Typer(help="Look at sessions and go on with them.", no_args_is_help=True)

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="A session's id.")]


@app.command("list")
def session_list(
    store: StoreOption = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state, as in WaitingForUser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One SessionInfo a line.")] = False,
) -> None:
    """List the store's sessions."""

    async def work() -> None:
        async with open_storage(load_settings(store=store).store) as storage:
            infos = [info async for info in list_sessions(storage, state=state)]
        if as_json:
            for info in infos:
                print(info.model_dump_json())
        else:
            console.show_sessions(infos)

    asyncio.run(work())


@app.command("show")
def session_show(
    session: SessionArgument,
    store: StoreOption = None,
    tree: Annotated[bool, typer.Option("--tree", help="The sub-agents below it, instead of what was said.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a session's state and everything that was said."""

    async def work() -> None:
        async with open_storage(load_settings(store=store).store) as storage:
            if tree:
                below = await read_tree(storage, session)
                if as_json:
                    console.print_json(below.model_dump(mode="json"))
                else:
                    console.show_tree(below)
                return
            info = info_of(await read_head(storage, session))
            transcript = await read_transcript(storage, session)
        if as_json:
            shown = {"info": info.model_dump(mode="json"), "transcript": transcript.model_dump(mode="json")}
            console.print_json(shown)
        else:
            console.show_transcript(info, transcript)

    asyncio.run(work())


@app.command("cancel")
def session_cancel(
    session: SessionArgument,
    reason: Annotated[str, typer.Option(help="Kept with the session.")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Park a session and everything below it; `resume` goes on later."""
    url = load_settings(store=store).store

    async def work() -> RunResult | None:
        async with open_storage(url) as storage:
            head = await read_head(storage, session)
        if not may_park(head):
            return None
        return await where_it_runs(url, head.owner, session, lambda handle: handle.cancel(reason))

    report_or_nothing(run_work(work(), as_json=as_json), session, as_json=as_json)


@app.command("terminate")
def session_terminate(session: SessionArgument, store: StoreOption = None) -> None:
    """End a session and everything below it at once; `resume` still goes on later."""
    url = load_settings(store=store).store

    async def work() -> None:
        async with open_storage(url) as storage:
            owner = (await read_head(storage, session)).owner
        await where_it_runs(url, owner, session, lambda handle: handle.terminate())

    asyncio.run(work())
    console.err.print(f"terminated {session}")


@app.command("answer")
def session_answer(
    session: SessionArgument,
    response: Annotated[str, typer.Argument(help="The answer; it becomes the waiting call's result.")],
    interrupt: Annotated[str | None, typer.Option(help="The question's id; default: the one that is open.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    local: LocalOption = False,
) -> None:
    """Answer a session's open question and run on."""
    url = load_settings(store=store).store

    async def work() -> RunResult:
        async with open_storage(url) as storage:
            info = info_of(await read_head(storage, session))
        if info.waiting_for is None:
            raise UnknownInterrupt(f"session {session!r} has no open question; it is {info.state}", session_id=session)
        async with open_runtime(url, local=local) as runtime:
            handle = await runtime.open(session)
            return await cancelling(handle, handle.answer(interrupt or info.waiting_for.id, response))

    result = run_work(work(), as_json=as_json)
    show_text(result, as_json=as_json)
    report(result, as_json=as_json)


@app.command("resume")
def session_resume(
    session: SessionArgument, store: StoreOption = None, as_json: JsonOption = False, local: LocalOption = False
) -> None:
    """Go on with an interrupted session, or take over one whose process died."""
    url = load_settings(store=store).store

    async def work() -> RunResult | None:
        async with open_storage(url) as storage:
            await read_head(storage, session)
        async with open_runtime(url, local=local) as runtime:
            handle = await runtime.open(session)
            return await cancelling(handle, handle.resume())

    result = run_work(work(), as_json=as_json)
    if result is not None:
        show_text(result, as_json=as_json)
    report_or_nothing(result, session, as_json=as_json)


@app.command("delete")
def session_delete(session: SessionArgument, store: StoreOption = None) -> None:
    """Delete a session and everything below it, for good."""
    url = load_settings(store=store).store

    async def work() -> None:
        owner = None
        async with open_storage(url) as storage:
            if not await storage.is_tombstone(session):  # one that was cut off is gone on with
                owner = (await read_head(storage, session)).owner
        await where_it_runs(url, owner, session, lambda handle: handle.delete())

    asyncio.run(work())
    console.err.print(f"deleted {session}")
