"""The command line. Each command makes a runtime, calls one verb of it and shows what came back."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer

from greenroom import __version__, batch_cli, console, pool_cli, sandbox_cli, session_cli, store_cli
from greenroom.agent_options import DEFAULT_SANDBOX, agent_for
from greenroom.commands import (
    EXIT_CODE,
    JsonOption,
    LocalOption,
    StoreOption,
    cancelling,
    finish,
    open_runtime,
    report,
    run_work,
)
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import (
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
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.settings import Settings, load_settings

USAGE = 2

app = typer.Typer(
    name="greenroom",
    help="Durable agents on Ray: sessions that survive crashes, cancel cleanly and tell the model the truth.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(batch_cli.app, name="batch")
app.add_typer(session_cli.app, name="session")
app.add_typer(sandbox_cli.app, name="sandbox")
app.add_typer(store_cli.app, name="store")
app.add_typer(pool_cli.app, name="pool")


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
    finish(asyncio.run(run_demo(settings.store)))


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
        config = _agent_of(settings, session)
        async with open_runtime(settings.store, local=local) as runtime:
            handle = await _session_for(runtime, config, session)
            return await _drive(handle, text, quiet=as_json)

    report(run_work(work(), as_json=as_json), as_json=as_json)


def main() -> None:
    """The console script: errors become one line that says what to do, and an exit code."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    as_json = "--json" in sys.argv[1:]
    try:
        app()
    except RunFailed as error:
        report(error.result, as_json=as_json, leave=False)
        sys.exit(EXIT_CODE[RunStatus.failed])
    except GreenroomError as error:
        console.show_error(error, as_json=as_json)
        sys.exit(USAGE if _is_usage(error) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


# -- how commands do it


def _agent_of(settings: Settings, session: str | None) -> AgentConfig | None:
    """The agent of a run; None to use what an existing session has stored."""
    config = agent_for(settings)
    if config is None and session is None:
        raise ConfigError("no model is named", hint="Give --model PROVIDER:NAME or --agent FILE, or set LLM_MODEL")
    return config


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

    return await cancelling(handle, follow())


def _is_usage(error: GreenroomError) -> bool:
    busy = isinstance(error, SessionError) and not isinstance(error, SessionNotFound | UnknownInterrupt)
    return isinstance(error, ConfigError | PreflightError | UsageError | SessionError) and not busy


if __name__ == "__main__":
    main()
