"""The command line. Each command makes a runtime, calls one verb of it and shows what came back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import typer

from greenroom import __version__, console, store_cli
from greenroom.embedded import AgentRuntime
from greenroom.runtime.config import AgentConfig, load_attribute
from greenroom.runtime.errors import (
    ClusterError,
    ConfigError,
    GreenroomError,
    PreflightError,
    RunFailed,
    SessionError,
    SessionNotFound,
    UnknownInterrupt,
    UsageError,
)
from greenroom.runtime.protocols import Runtime, Session
from greenroom.runtime.providers import provider_from_string
from greenroom.runtime.providers.optional import preflight
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.runtime.sessions import list_sessions, read_head, read_transcript
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tools.builtin import default_tools
from greenroom.runtime.verbs import may_park
from greenroom.runtime.view import info_of
from greenroom.settings import Settings, load_settings

EXIT_CODE = {
    RunStatus.completed: 0,
    RunStatus.failed: 1,
    RunStatus.suspended: 3,
    RunStatus.exhausted: 4,
    RunStatus.cancelled: 5,
}
USAGE = 2
DEFAULT_SANDBOX = "bubblewrap"
SANDBOX_HINT = (
    "Isolating sandboxes come with a later version. --sandbox host runs the agent's commands on this machine, as you, "
    "with no isolation"
)

T = TypeVar("T")

app = typer.Typer(
    name="greenroom",
    help="Durable agents on Ray: sessions that survive crashes, cancel cleanly and tell the model the truth.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
session_app = typer.Typer(help="Look at sessions and go on with them.", no_args_is_help=True)
app.add_typer(session_app, name="session")
app.add_typer(store_cli.app, name="store")

StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="sqlite:///FILE  [default: sqlite:///.greenroom/greenroom.db]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Run in this process, without Ray.")]
SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="A session's id.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.", is_eager=True)] = False,
) -> None:
    """Durable agents on Ray."""
    if version:
        print(f"greenroom {__version__}")
        raise typer.Exit()


@app.command()
def demo(
    store: StoreOption = None,
) -> None:
    """A parent, two sub-agents and one sandbox do a small real task on a local Ray. Needs no key and no network."""
    from greenroom.demo import run_demo

    settings = load_settings(store=store)
    _finish(asyncio.run(run_demo(settings.store)))


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="What the agent is to do; - reads it from the input.")] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="FILE|MODULE:ATTR", help="The agent; default: the default tools.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="PROVIDER:NAME", help="As in openai:gpt-5.")] = None,
    store: StoreOption = None,
    sandbox: Annotated[str | None, typer.Option(metavar="NAME", help=f"host or {DEFAULT_SANDBOX}.")] = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with this session, or make it under this id.")
    ] = None,
    as_json: JsonOption = False,
    local: LocalOption = False,
) -> None:
    """Run an agent on a message, live. Exit: 0 completed, 1 failed, 2 usage, 3 suspended, 4 exhausted, 5 cancelled."""
    settings = load_settings(agent=agent, model=model, sandbox=sandbox, store=store)
    text = sys.stdin.read() if prompt == "-" else prompt
    if text is None and session is None:
        raise ConfigError("there is no prompt", hint="Give it as an argument, or - to read it from the input")

    async def work() -> RunResult:
        config = await _agent_for(settings, session)
        async with _runtime(settings.store, local=local) as runtime:
            handle = await _session_for(runtime, config, session)
            return await _drive(handle, text, quiet=as_json)

    _report(_run(work(), as_json=as_json), as_json=as_json)


@session_app.command("list")
def session_list(
    store: StoreOption = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state, as in WaitingForUser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One SessionInfo a line.")] = False,
) -> None:
    """List the store's sessions."""

    async def work() -> None:
        async with _storage(load_settings(store=store).store) as storage:
            infos = [info async for info in list_sessions(storage, state=state)]
        if as_json:
            for info in infos:
                print(info.model_dump_json())
        else:
            console.show_sessions(infos)

    asyncio.run(work())


@session_app.command("show")
def session_show(session: SessionArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show a session's state and everything that was said."""

    async def work() -> None:
        async with _storage(load_settings(store=store).store) as storage:
            info = info_of(await read_head(storage, session))
            transcript = await read_transcript(storage, session)
        if as_json:
            shown = {"info": info.model_dump(mode="json"), "transcript": transcript.model_dump(mode="json")}
            console.print_json(shown)
        else:
            console.show_transcript(info, transcript)

    asyncio.run(work())


@session_app.command("cancel")
def session_cancel(
    session: SessionArgument,
    reason: Annotated[str, typer.Option(help="Kept with the session.")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Park a session and everything below it; `resume` goes on later."""
    url = load_settings(store=store).store

    async def work() -> RunResult | None:
        async with _storage(url) as storage:
            head = await read_head(storage, session)
        if not may_park(head):
            return None
        kind, namespace, _ = f"{head.owner or ''}::".split(":", 2)
        with contextlib.suppress(ClusterError):  # no Ray there: nobody runs it any more, the store alone decides
            if kind == "ray":
                async with _attached(url, namespace) as runtime:
                    handle = await runtime.open(session)
                    return await handle.cancel(reason)
        async with AgentRuntime(url) as embedded:
            return await embedded.handle(session).cancel(reason)

    _report_or_nothing(_run(work(), as_json=as_json), session, as_json=as_json)


@session_app.command("answer")
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
        async with _storage(url) as storage:
            info = info_of(await read_head(storage, session))
        if info.waiting_for is None:
            raise UnknownInterrupt(f"session {session!r} has no open question; it is {info.state}", session_id=session)
        async with _runtime(url, local=local) as runtime:
            handle = await runtime.open(session)
            return await _cancelling(handle, handle.answer(interrupt or info.waiting_for.id, response))

    result = _run(work(), as_json=as_json)
    _show_text(result, as_json=as_json)
    _report(result, as_json=as_json)


@session_app.command("resume")
def session_resume(
    session: SessionArgument, store: StoreOption = None, as_json: JsonOption = False, local: LocalOption = False
) -> None:
    """Go on with an interrupted session, or take over one whose process died."""
    url = load_settings(store=store).store

    async def work() -> RunResult | None:
        async with _storage(url) as storage:
            await read_head(storage, session)
        async with _runtime(url, local=local) as runtime:
            handle = await runtime.open(session)
            return await _cancelling(handle, handle.resume())

    result = _run(work(), as_json=as_json)
    if result is not None:
        _show_text(result, as_json=as_json)
    _report_or_nothing(result, session, as_json=as_json)


@session_app.command("delete")
def session_delete(session: SessionArgument, store: StoreOption = None) -> None:
    """Delete a session and everything below it, for good."""
    url = load_settings(store=store).store

    async def work() -> None:
        async with _storage(url) as storage:
            head = await read_head(storage, session)
        kind, namespace, _ = f"{head.owner or ''}::".split(":", 2)
        with contextlib.suppress(ClusterError):
            if kind == "ray":
                async with _attached(url, namespace) as runtime:
                    await (await runtime.open(session)).delete()
                    return
        async with AgentRuntime(url) as embedded:
            await embedded.handle(session).delete()

    asyncio.run(work())
    console.err.print(f"deleted {session}")


def main() -> None:
    """The console script: errors become one line that says what to do, and an exit code."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    as_json = "--json" in sys.argv[1:]
    try:
        app()
    except RunFailed as error:
        _report(error.result, as_json=as_json, leave=False)
        sys.exit(EXIT_CODE[RunStatus.failed])
    except GreenroomError as error:
        console.show_error(error, as_json=as_json)
        sys.exit(USAGE if _is_usage(error) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


# -- how commands do it


def _run(work: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """Runs a command's work; where the output is to be one JSON object, nobody else writes to it meanwhile."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return asyncio.run(work)


@asynccontextmanager
async def _storage(url: str) -> AsyncIterator[Storage]:
    storage = Storage.open(url)
    try:
        await storage.probe()
        yield storage
    finally:
        await storage.close()


@asynccontextmanager
async def _runtime(url: str, *, local: bool) -> AsyncIterator[Runtime]:
    if local:
        async with AgentRuntime(url) as embedded:
            yield embedded
    else:
        from greenroom.actors.client import connect

        async with connect(storage=url, namespace=_namespace_of(url)) as on_ray:
            yield on_ray


@asynccontextmanager
async def _attached(url: str, namespace: str) -> AsyncIterator[Runtime]:
    from greenroom.actors.client import connect

    async with connect(address="auto", storage=url, namespace=namespace) as runtime:
        yield runtime


def _namespace_of(url: str) -> str:
    """A pool serves one store: the command line gives each store a pool of its own on a Ray that many share."""
    return f"greenroom-{hashlib.sha256(Storage.open(url).url.encode()).hexdigest()[:12]}"


async def _agent_for(settings: Settings, session: str | None) -> AgentConfig | None:
    """The agent of a run; None to use what an existing session has stored."""
    kind = settings.sandbox
    if settings.agent is not None:
        config = _load_agent(settings.agent)
        if settings.model is not None:
            config = dataclasses.replace(config, provider=provider_from_string(settings.model))
        if kind is not None:
            config = dataclasses.replace(config, sandbox=kind)
    elif settings.model is not None:
        kind = kind or DEFAULT_SANDBOX
        config = AgentConfig(
            name="agent",
            provider=provider_from_string(settings.model),
            tools=default_tools("host" if kind == "host" else "sandboxed"),
            sandbox=kind,
        )
    elif session is not None:
        return None
    else:
        raise ConfigError("no model is named", hint="Give --model PROVIDER:NAME or --agent FILE, or set LLM_MODEL")
    spec = config.sandbox_spec
    if spec is not None and spec.kind == "bubblewrap":
        raise ConfigError("the sandbox 'bubblewrap' is not available in this version", hint=SANDBOX_HINT)
    preflight(config.llm)
    return config


def _load_agent(name: str) -> AgentConfig:
    if ":" not in name or os.path.exists(name):
        return AgentConfig.load(name)
    found = load_attribute(name)
    if not isinstance(found, AgentConfig):
        raise ConfigError(f"{name} is a {type(found).__name__}", hint="Name an AgentConfig")
    return found


async def _session_for(runtime: Runtime, config: AgentConfig | None, session: str | None) -> Session:
    if session is not None:
        try:
            return await runtime.open(session, config)
        except SessionNotFound:
            if config is None:
                raise
    assert config is not None, "without a session there is an agent"
    return await runtime.create_session(config, session)


async def _drive(handle: Session, text: str | None, *, quiet: bool) -> RunResult:
    """Runs and shows the run live; an interrupt key cancels it."""

    async def follow() -> RunResult:
        live = console.LiveRun()
        result: RunResult | None = None
        async for event in handle.stream(text):
            if not quiet:
                live.show(event)
            if event.type == "run_finished":
                result = event.result
        assert result is not None, "a stream always ends with run_finished"
        return result

    return await _cancelling(handle, follow())


async def _cancelling(handle: Session, work: Coroutine[Any, Any, T]) -> T:
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


def _show_text(result: RunResult, *, as_json: bool) -> None:
    if result.text and not as_json:
        console.out.print(result.text, markup=False)


def _report(result: RunResult, *, as_json: bool, leave: bool = True) -> None:
    if as_json:
        print(console.result_json(result))
    else:
        console.show_end(result)
    if leave:
        _finish(EXIT_CODE[result.status])


def _report_or_nothing(result: RunResult | None, session: str, *, as_json: bool) -> None:
    if result is not None:
        _report(result, as_json=as_json)
    elif as_json:
        console.print_json({"session_id": session, "status": None})
    else:
        console.err.print("nothing is in flight")


def _finish(code: int) -> None:
    raise typer.Exit(code)


def _is_usage(error: GreenroomError) -> bool:
    busy = isinstance(error, SessionError) and not isinstance(error, SessionNotFound | UnknownInterrupt)
    return isinstance(error, ConfigError | PreflightError | UsageError | SessionError) and not busy


if __name__ == "__main__":
    main()
