"""Commands through a keeper: the owner's side of keeper.py.

A command ends when its own process exits; a pipe that a child left behind still holds is read to nowhere. Killing takes
the whole tree. The keeper ends everything when this process is gone, however it went.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakSet

from greenroom.runtime.calls import SandboxLimits
from greenroom.runtime.errors import SandboxDied, SandboxError, SandboxUnavailable
from greenroom.sandbox.command import Command
from greenroom.sandbox.pipe import OutputPipe

KEEPER = Path(__file__).with_name("keeper.py")
START_TIMEOUT = 20.0
MAX_REPLY = 1 << 16
"""Bytes of one reply of a keeper; what is in a sandbox with it might speak in its name."""

REPLIES_AT_ONCE = 64
"""Replies that are read before the event loop gets its turn again."""

MAX_COMPLAINT = 2000
"""Characters of what a keeper that did not start has said."""

MAX_INLINE_COMMAND = 64 * 1024
"""Bytes of a request; the kernel takes no longer argument than 128 KiB, so a longer command goes along as a script."""

KILL_TIMEOUT = 5.0
"""Seconds to wait for a killed tree to be gone."""

STOP_TIMEOUT = 10.0
"""Seconds in which a keeper has stopped everything that runs, or let it go on."""

MAX_PATH = 4096
"""Characters of a path that a keeper tells; a longer one is none."""


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


def _path(told: object) -> str | None:
    """A path as a keeper tells it; what is in there with it may speak in its name."""
    good = isinstance(told, str) and told.startswith("/") and told.isprintable() and len(told) <= MAX_PATH
    return str(told) if good else None


def _started(launch: Launch, program: Sequence[str], complaints: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The keeper's process and our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        try:
            process = subprocess.Popen(
                [*launch.prefix, *program, str(theirs.fileno()), json.dumps(dict(launch.limits))],
                pass_fds=[theirs.fileno(), *launch.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,
                env={},
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


class Keeper:
    """A running keeper. Belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._commands: dict[str, Command] = {}
        self._pipes: WeakSet[OutputPipe] = WeakSet()
        self._filing: dict[str, OutputPipe] = {}
        self._count = 0
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._alive = True
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def start(cls, launch: Launch | None = None) -> Keeper:
        """Raises SandboxUnavailable with what the process said."""
        launch = launch or Launch()
        program = [launch.python, "-I", "-S", launch.script]
        with tempfile.TemporaryFile() as complaints:
            keeper: Keeper | None = None
            try:
                keeper = cls(*_started(launch, program, complaints.fileno()))
                await asyncio.wait_for(asyncio.shield(keeper._ready), START_TIMEOUT)
            except (TimeoutError, SandboxDied, OSError) as error:
                if keeper is not None:
                    await keeper.close()
                said = os.pread(complaints.fileno(), MAX_COMPLAINT, 0).decode("utf-8", "replace").strip()
                raise SandboxUnavailable(
                    "the process that keeps a sandbox's commands did not start; "
                    f"it said: {said or (str(error) if isinstance(error, OSError) else 'nothing')}",
                    hint=f"Try it: {' '.join(program)}",
                ) from None
            except BaseException:
                if keeper is not None:
                    await keeper.close()
                raise
        return keeper

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def busy(self) -> bool:
        """Whether anything runs, also such as a command has left behind."""
        return bool(self._commands)

    def run(
        self,
        command: str,
        places: tuple[str, str],
        env: Mapping[str, str],
        timeout: float | None,
        limits: SandboxLimits,
    ) -> Command:
        """Starts a bash command; it is killed after `timeout` seconds. Raises SandboxDied.

        places: the folder where it begins, and the one where it begins if that is gone.
        """
        self._count += 1
        id = str(self._count)
        read_end, write_end = os.pipe()
        try:
            self._send_command(id, command, places, env, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        pipe = OutputPipe(read_end, limits, partial(self._ask_for_file, id))
        self._pipes.add(pipe)
        running = self._commands[id] = Command(pipe, partial(self._end_tree, id), timeout)
        return running

    async def _end_tree(self, id: str, command: Command) -> None:
        """Ends the command's whole tree; returns when it is gone, or after KILL_TIMEOUT."""
        if not self._alive or command.gone.is_set():
            return
        self._send({"kill": id})
        waiting = asyncio.ensure_future(command.gone.wait())
        await asyncio.wait([waiting], timeout=KILL_TIMEOUT)
        waiting.cancel()

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Everything that runs stands still meanwhile; nothing is started."""
        if not self._commands:
            yield
            return
        try:
            await self._ask("stop", "stopped")
            yield
        finally:
            await asyncio.shield(asyncio.ensure_future(self._ask("go", "going")))

    async def _ask(self, what: str, answer: str) -> None:
        """Raises SandboxDied when the keeper is gone, or says nothing."""
        self._count += 1
        key = (answer, self._count)
        told = self._waiting[key] = self._loop.create_future()
        try:
            self._send({what: self._count})
            async with asyncio.timeout(STOP_TIMEOUT):
                await told
        except TimeoutError:
            self._lost()
            raise SandboxDied("the sandbox's keeper does not answer") from None
        finally:
            self._waiting.pop(key, None)

    def _ask_for_file(self, id: str, pipe: OutputPipe) -> None:
        """For a command's long output; its pipe is told also when that comes to nothing."""
        try:
            self._send({"spill": id})
        except SandboxError:
            pipe.write_to(None, "")
        else:
            self._filing[id] = pipe

    def _send_command(
        self, id: str, command: str, places: tuple[str, str], env: Mapping[str, str], output: int
    ) -> None:
        body = command.encode("utf-8", "surrogateescape")
        cwd, home = places
        request = {"run": id, "argv": ["bash", "-c", command], "cwd": cwd, "home": home, "env": dict(env)}
        if len(json.dumps(request)) <= MAX_INLINE_COMMAND:
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
        running = list(self._commands.values())
        self._lost()
        for pipe in list(self._pipes):
            pipe.close()
        await asyncio.to_thread(self._wait_for_end)
        await asyncio.gather(*(command.wait() for command in running))

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        if not self._alive:
            raise SandboxDied("the sandbox's keeper is gone", ran=False)
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self._sock, [data], descriptors)
        except BlockingIOError:
            raise SandboxError("the sandbox's keeper takes no requests at the moment", hint="Try again") from None
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
            raise SandboxDied("the sandbox's keeper is gone", ran=False) from None

    def _receive(self) -> None:
        for _ in range(REPLIES_AT_ONCE):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, MAX_REPLY, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self._lost()
                return
            try:
                self._handle(json.loads(data), descriptors)
            except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
                # no keeper of ours speaks so
                self._lost()
                return
            finally:
                for fd in descriptors:
                    os.close(fd)

    def _handle(self, message: dict[str, object], descriptors: list[int]) -> None:
        """`descriptors`: who keeps one takes it off the list."""
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        for kind in message.keys() & {"stopped", "going"}:
            told = self._waiting.get((kind, int(str(message[kind]))))
            if told is not None and not told.done():
                told.set_result(None)
            return
        if "spilled" in message:
            pipe = self._filing.pop(str(message["spilled"]), None)
            if pipe is not None:
                path = _path(message.get("path"))
                good = path is not None and len(descriptors) == 1 and stat.S_ISREG(os.fstat(descriptors[0]).st_mode)
                pipe.write_to(descriptors.pop() if good else None, path or "")
            return
        (kind,) = message.keys() & {"exit", "failed", "oom", "gone"}
        command = self._commands.get(str(message[kind]))
        if command is None:
            return
        if kind == "oom":
            command.oom = True
        elif kind == "exit" and not command.exited.done():
            command.cwd = _path(message.get("cwd"))
            command.exited.set_result(os.waitstatus_to_exitcode(int(str(message["status"]))))
        elif kind == "failed" and not command.exited.done():
            error = str(message["error"])[:MAX_COMPLAINT]
            command.exited.set_exception(OSError(f"the command cannot be started: {error}"))
        elif kind == "gone":
            command.gone.set()
            command.lost("the command's process was lost")
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
        for pipe in self._filing.values():
            pipe.write_to(None, "")
        self._filing.clear()
        for told in self._waiting.values():
            if not told.done():
                told.set_exception(SandboxDied("the sandbox's keeper is gone"))
        for command in self._commands.values():
            command.gone.set()
            command.lost("the sandbox's keeper is gone")
        self._commands.clear()
