"""What the command line shows: a run as it happens, results, sessions, errors. Plain where there is no terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from greenroom.runtime.errors import GreenroomError
from greenroom.runtime.events import Event
from greenroom.runtime.messages import Message, TextBlock, ToolCallBlock, ToolResultBlock
from greenroom.runtime.results import RunResult, RunStatus, SessionInfo, SessionTree, Transcript

if TYPE_CHECKING:
    from greenroom.actors.wire import PoolStatus

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

STATUS_STYLE = {
    RunStatus.completed: "green",
    RunStatus.suspended: "yellow",
    RunStatus.exhausted: "yellow",
    RunStatus.cancelled: "yellow",
    RunStatus.failed: "red",
}
MAX_SHOWN = 200
"""Characters of a call or a result in a live view."""


class LiveRun:
    """Prints a run's events as they come; `indent` sets a sub-agent's lines off."""

    def __init__(self, label: str = "", indent: int = 0) -> None:
        self._prefix = "  " * indent + (f"[cyan]{escape(label)}[/cyan] " if label else "")
        self._streaming = indent == 0
        self._in_text = False
        self._calls: dict[str, tuple[str, float]] = {}
        self._pending: list[ToolCallBlock] = []

    def show(self, event: Event) -> None:
        match event.type:
            case "text" if self._streaming:
                self._in_text = True
                out.print(event.text, end="", markup=False)
            case "message":
                self._end_text()
                self._pending = list(event.message.tool_calls)
                if not self._streaming and event.message.text:
                    self._line(f"[dim]says[/dim] {escape(_short(event.message.text))}")
            case "tool_started":
                self._end_text()
                arguments = self._arguments_of(event.call_key)
                self._calls[event.call_key] = (event.name, time.monotonic())
                self._line(f"[bold]{escape(event.name)}[/bold] {escape(arguments)}")
            case "tool_progress":
                self._line(f"[dim]{escape(event.text.rstrip())}[/dim]")
            case "tool_finished":
                name, began = self._calls.pop(event.call_key, ("", time.monotonic()))
                mark = "[red]failed[/red]" if event.is_error else "[green]done[/green]"
                self._line(f"[dim]{escape(name)}[/dim] {mark} [dim]{time.monotonic() - began:.1f} s[/dim]")
            case "retry":
                self._end_text()
                self._line(f"[yellow]retry in {event.delay:.1f} s[/yellow] {escape(event.failure.message)}")
            case "reset":
                self._end_text()
                self._line("[yellow]the last output is void; it goes on from the last saved step[/yellow]")
            case "run_finished":
                self._end_text()

    def _line(self, markup: str) -> None:
        out.print(self._prefix + markup)

    def _end_text(self) -> None:
        if self._in_text:
            out.print()
        self._in_text = False

    def _arguments_of(self, call_key: str) -> str:
        index = int(call_key.rsplit("/", 1)[1])
        if index >= len(self._pending):
            return ""
        arguments = self._pending[index].arguments or {}
        only = next(iter(arguments.values())) if len(arguments) == 1 else arguments
        return _short(only if isinstance(only, str) else json.dumps(only, ensure_ascii=False))


def show_end(result: RunResult) -> None:
    """How the run ended and what can be done now, on the error stream: the answer alone is output."""
    style = STATUS_STYLE[result.status]
    tokens = result.usage.input_tokens + result.usage.output_tokens
    err.print(
        f"[{style}]{result.status}[/{style}] [dim]· {result.steps} steps · {tokens} tokens · "
        f"session[/dim] {escape(result.session_id)}"
    )
    if result.failure is not None:
        err.print(f"[red]{result.failure.kind}[/red]: {escape(result.failure.message)}")
    if result.interrupt is not None:
        question = result.interrupt.payload.get("question") or json.dumps(result.interrupt.payload, ensure_ascii=False)
        err.print(f"[yellow]asks[/yellow] {escape(str(question))}")
        for option in result.interrupt.payload.get("options") or ():
            err.print(f"  - {escape(str(option))}")
        err.print(f"[dim]answer with[/dim] greenroom session answer {escape(result.session_id)} 'YOUR ANSWER'")
    if result.status is RunStatus.cancelled:
        err.print(f"[dim]go on with[/dim] greenroom session resume {escape(result.session_id)}")


def show_error(error: GreenroomError, *, as_json: bool) -> None:
    if as_json:
        document = {"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}}
        print(json.dumps(document, ensure_ascii=False))
        return
    err.print(f"[red]error:[/red] {escape(error.message)}")
    if error.hint:
        err.print(f"[dim]{escape(error.hint)}[/dim]")


def result_json(result: RunResult) -> str:
    """The one object of `run --json`."""
    document = result.model_dump(mode="json")
    keys = ("session_id", "status", "text", "usage", "steps", "revision", "interrupt", "failure", "background_tasks")
    return json.dumps({key: document[key] for key in keys}, ensure_ascii=False)


def show_sessions(infos: Iterable[SessionInfo]) -> None:
    rows = [("SESSION", "STATE", "SINCE", "REVISION", "TOKENS", "OWNER")]
    for info in infos:
        since = datetime.fromtimestamp(info.since).strftime("%Y-%m-%d %H:%M:%S")
        tokens = str(info.usage.input_tokens + info.usage.output_tokens)
        rows.append((info.session_id, info.state, since, str(info.revision), tokens, info.owner or ""))
    if len(rows) == 1:
        err.print("[dim]no sessions[/dim]")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        out.print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), markup=False)


def show_transcript(info: SessionInfo, transcript: Transcript) -> None:
    out.print(f"[bold]{escape(info.session_id)}[/bold] {info.state} [dim]revision {info.revision}[/dim]")
    if info.parent:
        out.print(f"[dim]sub-agent of[/dim] {escape(info.parent)}")
    for call_key, child in info.children.items():
        out.print(f"[dim]started[/dim] {escape(child)} [dim]in {escape(call_key.split('/', 1)[1])}[/dim]")
    for message in transcript.messages:
        _show_message(message)
    if info.waiting_for is not None:
        out.print(f"[yellow]waits for an answer to[/yellow] {escape(info.waiting_for.id)}")


def _show_message(message: Message) -> None:
    for block in message.content:
        match block:
            case TextBlock(text=text):
                out.print(f"[cyan]{message.role}[/cyan] {escape(text)}")
            case ToolCallBlock():
                shown = json.dumps(block.arguments, ensure_ascii=False) if block.arguments else block.raw_arguments
                out.print(f"[cyan]call[/cyan] [bold]{escape(block.name)}[/bold] {escape(shown)}")
            case ToolResultBlock():
                style = "red" if block.is_error else "cyan"
                out.print(f"[{style}]result[/{style}] {escape(block.text)}")
            case _:
                out.print(f"[cyan]{message.role}[/cyan] [dim]({block.type})[/dim]")


def show_pool(status: PoolStatus) -> None:
    out.print(
        f"[bold]{len(status.busy)}[/bold] of {status.size} places busy, [bold]{len(status.queued)}[/bold] waiting; "
        f"{status.session_actors} session actors ({status.idle} idle), {status.sandbox_actors} sandbox actors, "
        f"{status.clients} clients"
    )
    for mark, sessions in (("[green]runs[/green] ", status.busy), ("[yellow]waits[/yellow]", status.queued)):
        for session in sessions:
            out.print(f"{mark} {escape(session)}")


def show_tree(tree: SessionTree) -> None:
    out.print(session_tree(tree))


def session_tree(tree: SessionTree, labels: Mapping[str, str] | None = None) -> Tree:
    """A session and the sub-agents below it; labels: what else is said of some, by id."""

    def label(info: SessionInfo) -> str:
        said = (labels or {}).get(info.session_id, "")
        return f"{escape(said)} [bold]{escape(info.session_id)}[/bold] [green]{info.state}[/green]".strip()

    def grow(branch: Tree, below: SessionTree) -> Tree:
        for child in below.children:
            grow(branch.add(label(child.info)), child)
        return branch

    return grow(Tree(label(tree.info)), tree)


def print_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False))


def _short(text: str) -> str:
    line = " ⏎ ".join(text.strip().splitlines())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 1] + "…"
