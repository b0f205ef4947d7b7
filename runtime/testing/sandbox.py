"""A sandbox in memory: files in a dictionary, commands answered by a function. It records what it was asked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from greenroom.runtime.calls import ExecResult, SandboxSpec

Answer = str | ExecResult
Command = Callable[[str], Answer | Awaitable[Answer]]


class FakeSandbox:
    """`on_command`: what a command gives, a text (exit 0) or an ExecResult; may be async. `commands`: those asked for.

    `running`: commands under way now; one that is cancelled leaves the list, and `ended` names it.
    """

    kind = "host"
    guarantees: frozenset[str] = frozenset({"isolated", "no_network", "rooted_files"})

    def __init__(self, on_command: Command | None = None) -> None:
        self._on_command = on_command or (lambda command: f"ran: {command}")
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []
        self.running: list[str] = []
        self.ended: list[str] = []
        self.closed = False

    @property
    def alive(self) -> bool:
        return not self.closed

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult:
        self.commands.append(command)
        self.running.append(command)
        try:
            answer = self._on_command(command)
            if inspect.isawaitable(answer):
                answer = await answer
        except asyncio.CancelledError:
            self.ended.append(command)
            raise
        finally:
            self.running.remove(command)
        return answer if isinstance(answer, ExecResult) else ExecResult(status="exited", exit_code=0, output=answer)

    async def read_file(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def list_dir(self, path: str) -> tuple[str, ...]:
        prefix = "" if path in ("", ".") else path.rstrip("/") + "/"
        inside = {name[len(prefix) :] for name in self.files if name.startswith(prefix)}
        return tuple(sorted({f"{name.split('/')[0]}/" if "/" in name else name for name in inside}))

    async def close(self) -> None:
        self.closed = True


class FakeSandboxes:
    """A SandboxFactory that gives every tree a FakeSandbox; `opened` holds them by root."""

    def __init__(self, on_command: Command | None = None) -> None:
        self._on_command = on_command
        self.opened: dict[str, FakeSandbox] = {}

    async def open(self, spec: SandboxSpec, root: str, snapshot: str | None = None) -> FakeSandbox:
        sandbox = self.opened[root] = FakeSandbox(self._on_command)
        return sandbox
