"""Commands through a keeper: the owner's side of keeper.py.

A command ends when its own process exits; a pipe that a child left behind still holds is read to nowhere. Killing takes
the whole tree. The keeper ends everything when this process is gone, however it went.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxLimits
from greenroom.runtime.errors import SandboxDied, SandboxUnavailable
from greenroom.sandbox.output import OutputBuffer

KEEPER = Path(__file__).with_name("keeper.py")
START_TIMEOUT = 20.0
KILL_TIMEOUT = 5.0
"""Seconds to wait for a killed tree to be gone."""
DRAIN = 0.1
"""Seconds to go on reading after the command has exited: what it wrote last may still be in the pipe."""


@dataclass(slots=True)
class _Command:
    exited: asyncio.Future[int]
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Keeper:
    """A running keeper. Belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._commands: dict[str, _Command] = {}
        self._drains: set[int] = set()
        self._count = 0
        self._alive = True
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def start(cls) -> Keeper:
        """Raises SandboxUnavailable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220  # a fork and exec of milliseconds; asyncio's own would need a child watcher
                [sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        keeper = cls(process, ours)
        try:
            await asyncio.wait_for(asyncio.shield(keeper._ready), START_TIMEOUT)
        except (TimeoutError, SandboxDied):
            await keeper.close()
            raise SandboxUnavailable(
                "the process that keeps a sandbox's commands did not start",
                hint=f"Try: {sys.executable} -I -S {KEEPER}",
            ) from None
        return keeper

    @property
    def alive(self) -> bool:
        return self._alive

    async def run(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str], timeout: float | None, limits: SandboxLimits
    ) -> ExecResult:
        """Runs a command to its end; cancelling kills its tree first. Raises SandboxDied, OSError if it can't start."""
        buffer = OutputBuffer(limits.output_head, limits.output_tail)
        self._count += 1
        id = str(self._count)
        command = self._commands[id] = _Command(self._loop.create_future())
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        ended = self._loop.create_future()
        self._loop.add_reader(read_end, self._read, read_end, buffer, ended)
        self._drains.add(read_end)
        try:
            try:
                self._send({"run": id, "argv": list(argv), "cwd": cwd, "env": dict(env)}, write_end)
            finally:
                os.close(write_end)
            await asyncio.wait([command.exited], timeout=timeout)
            timed_out = not command.exited.done()
            if timed_out:
                await self._kill(id, command)
            await asyncio.wait([ended], timeout=DRAIN)
            return _result(command.exited.result() if not timed_out else None, buffer)
        except asyncio.CancelledError:
            await self._kill(id, command)
            raise
        finally:
            # A child that the command left behind may hold the pipe: from now on it is read to nowhere.
            if read_end in self._drains:
                self._loop.remove_reader(read_end)
                self._loop.add_reader(read_end, self._read, read_end, None, ended)
            if command.exited.done() and not command.exited.cancelled():
                command.exited.exception()
            if command.gone.is_set():
                self._commands.pop(id, None)

    async def close(self) -> None:
        """Ends everything the keeper runs; returns when all of it is gone."""
        self._lost()
        for fd in list(self._drains):
            self._forget(fd)
        await asyncio.to_thread(self._wait_for_end)

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _kill(self, id: str, command: _Command) -> None:
        if not self._alive or command.gone.is_set():
            return
        self._send({"kill": id})
        waiting = asyncio.ensure_future(command.gone.wait())
        await asyncio.wait([waiting], timeout=KILL_TIMEOUT)
        waiting.cancel()

    def _send(self, message: Mapping[str, object], descriptor: int | None = None) -> None:
        if not self._alive:
            raise SandboxDied("the sandbox's keeper is gone", ran=False)
        data = json.dumps(message).encode()
        try:
            if descriptor is None:
                self._sock.send(data)
            else:
                socket.send_fds(self._sock, [data], [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
            raise SandboxDied("the sandbox's keeper is gone", ran=False) from None

    def _receive(self) -> None:
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._handle(json.loads(data))

    def _handle(self, message: dict[str, object]) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        id = str(message.get("exit") or message.get("failed") or message.get("gone"))
        command = self._commands.get(id)
        if command is None:
            return
        if "exit" in message and not command.exited.done():
            command.exited.set_result(int(str(message["status"])))
        elif "failed" in message and not command.exited.done():
            command.exited.set_exception(OSError(f"the command cannot be started: {message['error']}"))
        elif "gone" in message:
            command.gone.set()
            if not command.exited.done():
                command.exited.set_exception(SandboxDied("the command's process was lost"))
            elif command.exited.done():
                self._commands.pop(id, None)

    def _lost(self) -> None:
        """No keeper any more: whatever still waits for it learns so."""
        if not self._alive:
            return
        self._alive = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if not self._ready.done():
            self._ready.set_exception(SandboxDied("the sandbox's keeper ended at once"))
        for command in self._commands.values():
            command.gone.set()
            if not command.exited.done():
                command.exited.set_exception(SandboxDied("the sandbox's keeper is gone"))

    def _read(self, fd: int, buffer: OutputBuffer | None, ended: asyncio.Future[None]) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and buffer is not None:
            buffer.add(data)
        elif not data:
            self._forget(fd)
            if not ended.done():
                ended.set_result(None)

    def _forget(self, fd: int) -> None:
        self._drains.discard(fd)
        self._loop.remove_reader(fd)
        os.close(fd)


def _result(status: int | None, buffer: OutputBuffer) -> ExecResult:
    output, dropped = buffer.text(), buffer.dropped
    if status is None:
        return ExecResult(status="timed_out", output=output, dropped_bytes=dropped)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return ExecResult(status="exited", exit_code=code, output=output, dropped_bytes=dropped)
    return ExecResult(status="signaled", signal=signal.Signals(-code).value, output=output, dropped_bytes=dropped)
