"""A sandbox in memory: files in a dictionary, commands answered by a function. It records what it was asked."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxSpec
from greenroom.runtime.storage.snapshots import Saved, Snapshot, SnapshotStore, Stream

Answer = str | ExecResult
Command = Callable[[str], Answer | Awaitable[Answer]]


class FakeSandbox:
    """`on_command`: what a command gives, a text (exit 0) or an ExecResult; may be async. `commands`: those asked for.

    background: which commands outlast every wait with a time limit; no time is measured here. `running`: commands under
    way now; one that is cancelled leaves the list, and `ended` names it.
    """

    kind = "host"
    guarantees: frozenset[str] = frozenset({"isolated", "no_network", "rooted_files"})

    def __init__(
        self, on_command: Command | None = None, *, background: Callable[[str], bool] = lambda command: False
    ) -> None:
        self._on_command = on_command or (lambda command: f"ran: {command}")
        self._background = background
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []
        self.running: list[str] = []
        self.ended: list[str] = []
        self.closed = False
        self._saved: tuple[str, dict[str, bytes]] | None = None

    @property
    def alive(self) -> bool:
        return not self.closed

    async def execute(self, command: str, *, timeout: float | None = None, cwd: str | None = None) -> ExecResult:
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

    async def start(self, command: str, *, cwd: str | None = None) -> FakeProcess:
        return FakeProcess(asyncio.ensure_future(self.execute(command)), lasting=self._background(command))

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

    async def pack(self, base: Saved | None, name: str) -> PackedFiles | None:
        files = dict(self.files)
        if base is not None and self._saved == (base.snapshot.name, files):
            return None
        self._saved = name, files
        return PackedFiles(name, base, files)

    async def fork(self, folder: Path) -> None:
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    async def close(self) -> None:
        self.closed = True


class PackedFiles:
    """The files of a FakeSandbox as they were, for a snapshot of one part."""

    def __init__(self, name: str, base: Saved | None, files: dict[str, bytes]) -> None:
        self._name = name
        self._base = base
        self._files = files

    async def put(self, store: SnapshotStore) -> Snapshot:
        body = json.dumps({name: data.hex() for name, data in self._files.items()}).encode()
        part = await store.put_part(f"{self._name}.files", body)
        snapshot = Snapshot(
            name=self._name,
            parent=None if self._base is None else self._base.snapshot.name,
            made=0.0,
            index=Stream(name="files", size=len(body), parts=(part,)),
            files=len(self._files),
            size=sum(len(data) for data in self._files.values()),
        )
        await store.put(snapshot)
        return snapshot

    def close(self) -> None:
        """There is nothing to let go of."""


async def restored_files(saved: Saved) -> dict[str, bytes]:
    """The files that a PackedFiles put away."""
    body = b"".join([piece async for piece in saved.store.read(saved.snapshot.index)])
    return {name: bytes.fromhex(data) for name, data in json.loads(body).items()}


class FakeProcess:
    """A command of a FakeSandbox; its output comes at its end, all at once."""

    def __init__(self, run: asyncio.Future[ExecResult], *, lasting: bool) -> None:
        self._run = run
        self._lasting = lasting
        self._taken = False

    async def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and self._lasting:
            await asyncio.sleep(0)
        else:
            await asyncio.wait([self._run])
        return self._run.done()

    async def news(self, timeout: float) -> None:
        if not self._taken:
            await self.wait(timeout)

    def take(self) -> tuple[str, int]:
        if not self._run.done() or self._run.cancelled() or self._taken:
            return "", 0
        self._taken = True
        return self._run.result().output, 0

    def end(self) -> ExecResult | None:
        if not self._run.done():
            return None
        if self._run.cancelled():
            return ExecResult(status="signaled", signal=9)
        return self._run.result().but(output="", dropped_bytes=0)

    async def kill(self) -> None:
        self._run.cancel()
        await asyncio.wait([self._run])


class FakeSandboxes:
    """A SandboxFactory that gives every tree a FakeSandbox; `opened` holds them by root."""

    def __init__(
        self, on_command: Command | None = None, *, background: Callable[[str], bool] = lambda command: False
    ) -> None:
        self._on_command = on_command
        self._background = background
        self.opened: dict[str, FakeSandbox] = {}

    async def open(self, spec: SandboxSpec, root: str, snapshot: Saved | None = None) -> FakeSandbox:
        sandbox = FakeSandbox(self._on_command, background=self._background)
        if snapshot is not None:
            sandbox.files = await restored_files(snapshot)
        self.opened[root] = sandbox
        return sandbox
