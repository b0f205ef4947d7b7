"""Commands through a keeper: the owner's side of keeper.py.

A command ends when its own process exits; a pipe that a child left behind still holds is read to nowhere. Killing takes
the whole tree. The keeper ends everything when this process is gone, however it went.
"""

from __future__ import annotations

import asyncio
import json
import os
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
MAX_REPLY = 1 << 16
"""Bytes of one reply of a keeper; what is in a sandbox with it might speak in its name."""

REPLIES_AT_ONCE = 64
"""Replies that are read before the event loop gets its turn again."""

MAX_COMPLAINT = 2000
"""Characters of what a keeper that did not start has said."""

MAX_INLINE_COMMAND = 64 * 1024
"""Bytes; the kernel takes no longer argument than 128 KiB, so a longer command goes along as a script."""
KILL_TIMEOUT = 5.0
"""Seconds to wait for a killed tree to be gone."""
DRAIN = 0.1
"""Seconds to go on reading after the command has exited: what it wrote last may still be in the pipe."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a keeper comes to run: `prefix` before its own command line, descriptors that the prefix needs.

    python, script: the interpreter and keeper.py as the keeper's surroundings know them; limits: see keeper.py.
    """

    prefix: Sequence[str] = ()
    python: str = sys.executable
    script: str = str(KEEPER)
    descriptors: Sequence[int] = ()
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Command:
    exited: asyncio.Future[int]
    oom: bool = False
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
    async def start(cls, launch: Launch | None = None) -> Keeper:
        """Raises SandboxUnavailable with what the process said."""
        launch = launch or Launch()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        complaints = os.memfd_create("complaints")
        with theirs:
            program = [launch.python, "-I", "-S", launch.script]
            arguments = [*program, str(theirs.fileno()), json.dumps(dict(launch.limits))]
            process = subprocess.Popen(  # noqa: ASYNC220  # a fork and exec of milliseconds; asyncio's own would need a child watcher
                [*launch.prefix, *arguments],
                pass_fds=[theirs.fileno(), *launch.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,
                env={},
            )
        keeper = cls(process, ours)
        try:
            await asyncio.wait_for(asyncio.shield(keeper._ready), START_TIMEOUT)
        except (TimeoutError, SandboxDied):
            await keeper.close()
            said = os.pread(complaints, MAX_COMPLAINT, 0).decode("utf-8", "replace").strip() or "nothing"
            raise SandboxUnavailable(
                f"the process that keeps a sandbox's commands did not start; it said: {said}",
                hint=f"Try it: {' '.join(program)}",
            ) from None
        finally:
            os.close(complaints)
        return keeper

    @property
    def alive(self) -> bool:
        return self._alive

    async def run(
        self, command: str, cwd: str, env: Mapping[str, str], timeout: float | None, limits: SandboxLimits
    ) -> ExecResult:
        """Runs a bash command to its end; cancelling kills its tree first.

        Raises SandboxDied, OSError if it cannot be started.
        """
        buffer = OutputBuffer(limits.output_head, limits.output_tail)
        self._count += 1
        id = str(self._count)
        running = self._commands[id] = _Command(self._loop.create_future())
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        ended = self._loop.create_future()
        self._loop.add_reader(read_end, self._read, read_end, buffer, ended)
        self._drains.add(read_end)
        try:
            try:
                self._send_command(id, command, cwd, env, write_end)
            finally:
                os.close(write_end)
            await asyncio.wait([running.exited], timeout=timeout)
            timed_out = not running.exited.done()
            if timed_out:
                await self._kill(id, running)
            await asyncio.wait([ended], timeout=DRAIN)
            return _result(None if timed_out else running.exited.result(), buffer, oom=running.oom)
        except asyncio.CancelledError:
            await self._kill(id, running)
            raise
        finally:
            # A child that the command left behind may hold the pipe: from now on it is read to nowhere.
            if read_end in self._drains:
                self._loop.remove_reader(read_end)
                self._loop.add_reader(read_end, self._read, read_end, None, ended)
            if running.exited.done() and not running.exited.cancelled():
                running.exited.exception()
            if running.gone.is_set():
                self._commands.pop(id, None)

    def _send_command(self, id: str, command: str, cwd: str, env: Mapping[str, str], output: int) -> None:
        body = command.encode("utf-8", "surrogateescape")
        request = {"run": id, "argv": ["bash", "-c", command], "cwd": cwd, "env": dict(env)}
        if len(body) <= MAX_INLINE_COMMAND:
            self._send(request, [output])
            return
        script = os.memfd_create("script")
        try:
            with os.fdopen(os.dup(script), "wb") as file:
                file.write(body)
            self._send({**request, "argv": ["bash", "/dev/fd/3"]}, [output, script])
        finally:
            os.close(script)

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

    def _send(self, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        if not self._alive:
            raise SandboxDied("the sandbox's keeper is gone", ran=False)
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self._sock, [data], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
            raise SandboxDied("the sandbox's keeper is gone", ran=False) from None

    def _receive(self) -> None:
        for _ in range(REPLIES_AT_ONCE):
            try:
                data = self._sock.recv(MAX_REPLY)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            try:
                self._handle(json.loads(data))
            except (ValueError, TypeError, AttributeError, RecursionError):  # no keeper of ours speaks so
                self._lost()
                return

    def _handle(self, message: dict[str, object]) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        (kind,) = message.keys() & {"exit", "failed", "oom", "gone"}
        command = self._commands.get(str(message[kind]))
        if command is None:
            return
        if kind == "oom":
            command.oom = True
        elif kind == "exit" and not command.exited.done():
            command.exited.set_result(os.waitstatus_to_exitcode(int(str(message["status"]))))
        elif kind == "failed" and not command.exited.done():
            error = str(message["error"])[:MAX_COMPLAINT]
            command.exited.set_exception(OSError(f"the command cannot be started: {error}"))
        elif kind == "gone":
            command.gone.set()
            if not command.exited.done():
                command.exited.set_exception(SandboxDied("the command's process was lost"))
            self._commands.pop(str(message[kind]), None)

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


def _result(code: int | None, buffer: OutputBuffer, *, oom: bool) -> ExecResult:
    """code: the exit code, a negative signal, or None for a command that was out of time."""
    output, dropped = buffer.text(), buffer.dropped
    if oom:
        return ExecResult(status="oom", output=output, dropped_bytes=dropped)
    if code is None:
        return ExecResult(status="timed_out", output=output, dropped_bytes=dropped)
    if code >= 0:
        return ExecResult(status="exited", exit_code=code, output=output, dropped_bytes=dropped)
    return ExecResult(status="signaled", signal=-code, output=output, dropped_bytes=dropped)
