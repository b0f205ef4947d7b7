"""What a keeper may say: a command might speak in its name, so nothing it says is believed blindly."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom import SandboxDied, SandboxLimits
from greenroom.sandbox.command import Command
from greenroom.sandbox.pipe import OutputPipe
from greenroom.sandbox.process import Keeper


class Liar:
    """A keeper whose replies the test makes up."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.keeper = Keeper(self.process, ours)

    def say(self, reply: Any, *descriptors: int) -> None:
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        socket.send_fds(self.theirs, [body], list(descriptors))

    def run(self, limits: SandboxLimits | None = None) -> Command:
        return self.keeper.run("true", ("/", "/"), {}, None, limits or SandboxLimits())


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    made = Liar()
    yield made
    made.process.kill()
    await made.keeper.close()
    made.theirs.close()
    assert made.process.stdin is not None
    made.process.stdin.close()


REPLIES: list[Any] = [
    b"no json",
    b"[1]",
    b'"text"',
    b"5",
    b"{}",
    b"[" * 60_000,
    {"exit": "1"},
    {"exit": "1", "status": "many"},
    {"exit": "1", "status": 10**40},
    {"exit": "1", "gone": "1"},
    {"unheard": "of"},
    {"failed": "1"},
    {"stopped": "x"},
    b'{"stopped": ' + b"1" * 5000 + b"}",
]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: str(reply)[:30])
async def test_a_reply_that_no_keeper_gives_is_its_end(liar: Liar, reply: Any) -> None:
    command = liar.run()
    liar.say(reply)
    assert await command.wait(5), "nobody waits for it for ever"
    assert not liar.keeper.alive
    with pytest.raises(SandboxDied):
        command.end()


async def test_what_is_said_of_others_is_no_matter(liar: Liar) -> None:
    command = liar.run()
    for reply in ({"exit": "9", "status": 0}, {"gone": "9"}, {"spilled": "9", "path": "/x"}, {"stopped": 99}):
        liar.say(reply)
    liar.say({"exit": "1", "status": 256, "cwd": "relative"})
    liar.say({"gone": "1"})
    assert await command.wait(5)
    end = command.end()
    assert end is not None
    assert (end.exit_code, end.cwd) == (1, None)
    assert liar.keeper.alive


@pytest.mark.parametrize("cwd", ["/a\nb", "/" + "x" * 5000, 7, ["/"], "", None])
async def test_a_folder_that_is_none_is_not_kept(liar: Liar, cwd: Any) -> None:
    command = liar.run()
    liar.say({"exit": "1", "status": 0, "cwd": cwd})
    liar.say({"gone": "1"})
    assert await command.wait(5)
    assert (command.end() or pytest.fail("it has ended")).cwd is None


async def test_descriptors_that_were_not_asked_for_are_closed(liar: Liar) -> None:
    command = liar.run()
    reading, writing = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        liar.say({"spilled": "1", "path": "/tmp/x"}, writing)
    liar.say({"exit": "1", "status": 0}, writing)
    liar.say({"gone": "1"})
    assert await command.wait(5)
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(reading)
    os.close(writing)


async def test_what_waits_for_a_file_that_never_comes_is_read_to_its_end() -> None:
    """The keeper is slow: the command has exited, and what it wrote last is still in the pipe."""
    reading, writing = os.pipe()
    asked = asyncio.Event()
    pipe = OutputPipe(reading, SandboxLimits(output_head=100, output_tail=100), lambda _: asked.set())
    os.write(writing, b"a" * 300)
    await asyncio.wait_for(asked.wait(), 5)
    os.write(writing, b"b" * 50)
    pipe.leave(lambda: False)
    text, dropped = pipe.take(final=True)
    assert text.endswith("b" * 50)
    assert dropped == 150
    os.close(writing)
    pipe.write_to(None, "")
    await asyncio.wait_for(pipe.drained, 5)
