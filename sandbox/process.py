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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxLimits
from greenroom.runtime.errors import SandboxDied, SandboxError, SandboxUnavailable
from greenroom.runtime.ports import Process
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
"""Bytes of a request; the kernel takes no longer argument than 128 KiB, so a longer command goes along as a script."""

NOWHERE_INTERVAL = 0.1
"""Seconds between two reads of what a child puts out that its command left behind."""

KILL_TIMEOUT = 5.0
"""Seconds to wait for a killed tree to be gone."""

STOP_TIMEOUT = 10.0
"""Seconds in which a keeper has stopped everything that runs, or let it go on."""

MAX_PATH = 4096
"""Characters of a path that a keeper tells; a longer one is none."""

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


class Command:
    """A running command: the Process of ports.py. `output`: where its pipe is read."""

    def __init__(self, keeper: Keeper, id: str, output: int, timeout: float | None, limits: SandboxLimits) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.gone = asyncio.Event()
        self.oom = False
        self.cwd: str | None = None
        self._keeper = keeper
        self._id = id
        self._output = output
        self._buffer = OutputBuffer(limits.output_head, limits.output_tail)
        self._kept = limits.output_head + limits.output_tail
        self._spill: int | None = None
        self._spill_room = limits.spill_bytes
        self._drained: asyncio.Future[None] = loop.create_future()
        self._timed_out = False
        self._closed = False
        self._news = asyncio.Event()
        self._over = loop.create_task(self._until_over(timeout))

    async def wait(self, timeout: float | None = None) -> bool:
        await asyncio.wait([self._over], timeout=timeout)
        return self._over.done()

    async def news(self, timeout: float) -> None:
        if not self._over.done():
            told = asyncio.ensure_future(self._news.wait())
            await asyncio.wait([told, self._over], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()

    def take(self) -> tuple[str, int]:
        self._news.clear()
        return self._buffer.take(final=self._over.done())

    def end(self) -> ExecResult | None:
        if not self._over.done():
            return None
        if self.oom:
            return ExecResult(status="oom")
        if self._timed_out:
            return ExecResult(status="timed_out")
        code = self.exited.result()
        if code < 0:
            return ExecResult(status="signaled", signal=-code)
        return ExecResult(status="exited", exit_code=code, cwd=self.cwd)

    async def kill(self) -> None:
        await self._keeper.kill(self._id, self)  # also of one that has ended: it may have left children
        if not self.exited.done():
            self.exited.set_exception(SandboxDied("the command would not end"))
        await asyncio.wait([self._over])

    def read(self) -> None:
        """There is something in the pipe."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._buffer.add(data)
        if self._spill is None and self._spill_room and self._buffer.total > self._kept:
            self._keeper.pause(self._output)  # all of it is still there, and waits for the file
            self._keeper.ask_for_spill(self._id, self)
            return
        self._news.set()
        if self._spill is not None:
            self._write_spill(data)

    def spill_to(self, fd: int | None, path: str) -> None:
        """The file for all of the output, None for no file: what came so far goes there first."""
        room, self._spill_room = self._spill_room, 0
        if fd is not None and not self._closed:
            self._spill, self._spill_room = fd, room
            self._buffer.whole = f"; the first {room} are in {path}"
            self._write_spill(self._buffer.held())
        elif fd is not None:
            os.close(fd)
        self._news.set()
        if not self._over.done():
            self._keeper.go_on(self._output, self.read)

    def _write_spill(self, data: bytes) -> None:
        assert self._spill is not None, "only then it is written"
        try:
            self._spill_room -= os.write(self._spill, data[: self._spill_room])
        except OSError:  # its room is full: what is there stays
            self._spill_room = 0

    def close(self) -> None:
        """Nothing more is read of what it puts out; the descriptor may be another command's from now on."""
        if not self._closed:
            self._closed = True
            self._keeper.forget(self._output)
            self._drained.set_result(None)
            if self._spill is not None:
                os.close(self._spill)
                self._spill = None

    def _read_to_nowhere(self) -> None:
        """So that a child which goes on is not stopped by a full pipe; slowly, so that it does not keep us busy."""
        if self._closed or not self._keeper.reads(self._output):
            return
        try:
            ended = not os.read(self._output, 1 << 16)
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended or self.gone.is_set():
            self.close()
        else:
            asyncio.get_running_loop().call_later(NOWHERE_INTERVAL, self._read_to_nowhere)

    async def _until_over(self, timeout: float | None) -> None:
        """To the command's end, and the end of what it wrote; a child that holds the pipe is read to nowhere then."""
        await asyncio.wait([self.exited], timeout=timeout)
        if not self.exited.done():
            self._timed_out = True
            await self._keeper.kill(self._id, self)
        await asyncio.wait([self._drained], timeout=DRAIN)
        if not self._closed:
            self._keeper.pause(self._output)
            self._read_to_nowhere()
        if self.exited.done() and not self.exited.cancelled():
            self.exited.exception()  # looked at, also when nobody asks how it ended


def _path(told: object) -> str | None:
    """A path as a keeper tells it; what is in there with it may speak in its name."""
    good = isinstance(told, str) and told.startswith("/") and told.isprintable() and len(told) <= MAX_PATH
    return str(told) if good else None


async def run_to_end(command: Process) -> ExecResult:
    """How the command ended, with what it put out; cancelling kills its tree first."""
    try:
        await command.wait()
    except asyncio.CancelledError:
        await command.kill()
        raise
    end = command.end()
    assert end is not None, "a command that was waited for has ended"
    output, dropped = command.take()
    return end.but(output=output, dropped_bytes=dropped)


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
        self._outputs: set[int] = set()
        self._count = 0
        self._spilling: dict[str, Command] = {}
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
        os.set_blocking(read_end, False)
        try:
            self._send_command(id, command, places, env, write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        running = self._commands[id] = Command(self, id, read_end, timeout, limits)
        self._loop.add_reader(read_end, running.read)
        self._outputs.add(read_end)
        return running

    async def kill(self, id: str, command: Command) -> None:
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

    def reads(self, fd: int) -> bool:
        """Whether this pipe is still open here."""
        return fd in self._outputs

    def pause(self, fd: int) -> None:
        """This pipe is read when somebody asks for it, no longer when there is something in it."""
        if fd in self._outputs:
            self._loop.remove_reader(fd)

    def go_on(self, fd: int, read: Callable[[], None]) -> None:
        """This pipe is read again when there is something in it."""
        if fd in self._outputs:
            self._loop.add_reader(fd, read)

    def ask_for_spill(self, id: str, command: Command) -> None:
        """Has the command told where its output may go; it is told also when that comes to nothing."""
        try:
            self._send({"spill": id})
        except SandboxError:
            command.spill_to(None, "")
        else:
            self._spilling[id] = command

    def forget(self, fd: int) -> None:
        """Nothing more is wanted out of this pipe."""
        if fd in self._outputs:
            self._outputs.discard(fd)
            self._loop.remove_reader(fd)
            os.close(fd)

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
        for fd in list(self._outputs):
            self.forget(fd)
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
            except (ValueError, TypeError, AttributeError, RecursionError):  # no keeper of ours speaks so
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
            spilling = self._spilling.pop(str(message["spilled"]), None)
            if spilling is not None:
                path = _path(message.get("path"))
                good = path is not None and len(descriptors) == 1 and stat.S_ISREG(os.fstat(descriptors[0]).st_mode)
                spilling.spill_to(descriptors.pop() if good else None, path or "")
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
        for command in self._spilling.values():
            command.spill_to(None, "")
        self._spilling.clear()
        for told in self._waiting.values():
            if not told.done():
                told.set_exception(SandboxDied("the sandbox's keeper is gone"))
        for command in self._commands.values():
            command.gone.set()
            if not command.exited.done():
                command.exited.set_exception(SandboxDied("the sandbox's keeper is gone"))
        self._commands.clear()
