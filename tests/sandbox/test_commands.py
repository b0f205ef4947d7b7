"""Commands in real sandboxes of both kinds: ends, kills, floods, wrappers, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenes import CASES, alive, until

from greenroom import ExecResult, SandboxDied, SandboxLimits, SandboxSpec, SandboxUnavailable
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.folder import FolderSandbox

CASE: dict[str, list[dict[str, Any]]] = json.loads((CASES / "C23_27_bash_commands.json").read_text())


@pytest.fixture(params=["host", "bubblewrap"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FolderSandbox]:
    spec = SandboxSpec(kind=request.param, workspace=str(tmp_path / "ws"))
    sandbox = await ShippedSandboxes().open(spec, "r")
    assert isinstance(sandbox, FolderSandbox)
    yield sandbox
    await sandbox.close()


@pytest.fixture
def marker() -> str:
    """A number of seconds that no other process sleeps for: finds a test's own processes."""
    return f"{600 + uuid.uuid4().int % 10**9}"


async def test_a_command_runs_in_the_workspace_and_gives_its_output(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute("pwd; echo out; echo err >&2; exit 3")
    shown = f"{sandbox.inside}\nout\nerr\n"
    assert result == ExecResult(status="exited", exit_code=3, output=shown, cwd=sandbox.inside)


@pytest.mark.parametrize("row", CASE["C23_pipe_holder"], ids=lambda row: row["cmd"])
async def test_a_command_ends_when_its_process_does_not_when_its_pipe_closes(
    sandbox: FolderSandbox, row: dict[str, Any], marker: str
) -> None:
    began = time.monotonic()
    result = await sandbox.execute(row["cmd"].replace("sleep 30", f"sleep {marker}"))
    assert time.monotonic() - began < 3
    assert (result.status, result.exit_code) == ("exited", 0)
    assert result.output.strip() == "done" or "disown" in row["cmd"]
    assert alive(marker), "what it left in the background goes on"
    assert (await sandbox.execute("echo next")).output == "next\n"
    await sandbox.close()
    assert alive(marker) == [], "and ends with its sandbox"


async def test_a_time_out_ends_the_whole_tree_and_keeps_the_output(sandbox: FolderSandbox, marker: str) -> None:
    command = f"echo before; trap '' TERM; (sleep {marker}) & setsid sleep {marker} & sleep {marker}"
    began = time.monotonic()
    result = await sandbox.execute(command, timeout=0.5)
    assert time.monotonic() - began < 5
    assert (result.status, result.output, result.exit_code) == ("timed_out", "before\n", None)
    assert alive(marker) == []


async def test_a_process_whose_first_thread_has_ended_is_ended_too(sandbox: FolderSandbox) -> None:
    """It looks like one that has ended, and is none."""
    script = """
import ctypes, platform, threading, time
def beat():
    while True:
        with open("beats", "a") as file:
            file.write("x")
        time.sleep(0.01)
threading.Thread(target=beat).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
    await sandbox.write_file("beat.py", script.encode())
    result = await sandbox.execute(f"{sandbox.python} beat.py & sleep 60", timeout=1)
    assert result.status == "timed_out"
    beats = await sandbox.read_file("beats")
    assert len(beats) > 5
    await asyncio.sleep(0.3)
    assert await sandbox.read_file("beats") == beats


async def test_a_delayed_effect_of_a_timed_out_command_never_comes(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute("(sleep 1; echo late > sentinel) & sleep 60", timeout=0.3)
    assert result.status == "timed_out"
    await asyncio.sleep(1.2)
    assert not (sandbox.workspace / "sentinel").exists()


async def test_cancelling_ends_the_tree_before_it_goes_on(sandbox: FolderSandbox, marker: str) -> None:
    task = asyncio.create_task(sandbox.execute(f"sleep {marker} & setsid sleep {marker} & wait"))
    await until(lambda: len(alive(marker)) >= 2, "the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []


async def test_a_flood_is_bounded_while_it_is_read_and_a_timeout_still_fires(sandbox: FolderSandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    result = await sandbox.execute("yes", timeout=1)
    assert time.monotonic() - began < 5
    assert result.status == "timed_out"
    assert result.dropped_bytes > 0
    long_line = await sandbox.execute("head -c 200000000 /dev/zero | tr '\\0' x")
    limits = SandboxLimits()
    assert len(long_line.output) <= limits.output_head + limits.output_tail + 100
    assert long_line.dropped_bytes == 200_000_000 - limits.output_head - limits.output_tail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    both = await sandbox.execute("yes e >&2 & yes o; wait", timeout=0.5)
    assert both.status == "timed_out"


async def test_output_is_cut_between_characters(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute('printf "\\360\\237\\246\\200%.0s" $(seq 50000)')
    assert result.dropped_bytes > 0
    assert "\ufffd" not in result.output


@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("cat", 0, ""),
        ('read -r x; echo "rc=$?"', 0, "rc=1\n"),
        ("python3 - <<'PY'\nprint(1)\nPY", 0, "1\n"),
        ("echo hi # note", 0, "hi\n"),
        ("set -e; false", 1, ""),
        ('printf "\\033[31mred\\033[0m\\000Z"', 0, "\x1b[31mred\x1b[0m\x00Z"),
        ("printf '\\377x'", 0, "\ufffdx"),
        ("exit 3", 3, ""),
    ],
)
async def test_a_command_gets_no_input_and_no_wrapper(
    sandbox: FolderSandbox, command: str, exit_code: int, output: str
) -> None:
    result = await sandbox.execute(command, timeout=20)
    assert (result.status, result.exit_code, result.output) == ("exited", exit_code, output)


async def test_unfinished_shell_text_ends_by_itself(sandbox: FolderSandbox) -> None:
    assert (await sandbox.execute("cat <<EOF\nnever closed", timeout=20)).output.endswith("never closed\n")
    unclosed = await sandbox.execute('echo "unclosed', timeout=20)
    assert (unclosed.status, unclosed.exit_code) == ("exited", 2)


async def test_an_end_by_signal_is_told_apart(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute("printf abc; kill -9 $$")
    assert result == ExecResult(status="signaled", signal=signal.SIGKILL, output="abc")


async def test_a_command_longer_than_the_kernel_takes_still_runs(sandbox: FolderSandbox) -> None:
    assert (await sandbox.execute(f"x={'y' * 300_000}; echo ${{#x}}")).output == "300000\n"


async def test_commands_do_not_see_this_process_secrets(
    sandbox: FolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    output = (await sandbox.execute("env; cat /proc/self/environ")).output
    assert "sk-secret" not in output
    assert f"HOME={sandbox.inside}" in output


async def test_many_commands_run_at_once(sandbox: FolderSandbox) -> None:
    results = await asyncio.gather(*(sandbox.execute(f"sleep 0.1; echo {n}") for n in range(20)))
    assert [result.output for result in results] == [f"{n}\n" for n in range(20)]


async def test_no_command_takes_another_ones_output(sandbox: FolderSandbox) -> None:
    """Descriptors are used again at once: one that ends its output early lets go of it before it ends itself."""

    async def early() -> None:
        assert (await sandbox.execute("echo early; exec >&- 2>&-; sleep 0.2")).output == "early\n"

    async def short(number: int) -> None:
        assert (await sandbox.execute(f"echo {number}; sleep 0.1; echo {number}")).output == f"{number}\n{number}\n"

    for round in range(3):
        first = [asyncio.create_task(early()) for _ in range(5)]
        await asyncio.sleep(0.1)
        await asyncio.gather(*first, *(short(round * 10 + number) for number in range(10)))


async def test_a_lost_keeper_is_not_shown_as_output(sandbox: FolderSandbox, marker: str) -> None:
    task = asyncio.create_task(sandbox.execute(f"(setsid sleep {marker} &); sleep {marker}; true"))
    await until(lambda: len(alive(marker)) == 3, "the command and what it started run")
    os.kill(sandbox._keeper._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await asyncio.wait_for(task, 10)
    with pytest.raises(SandboxDied):
        await sandbox.execute("echo more")
    await until(lambda: alive(marker) == [], "the command ends with its keeper")


@pytest.mark.parametrize("kind", ["host", "bubblewrap"])
def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path, marker: str, kind: str) -> None:
    script = f"""
import asyncio
from greenroom import SandboxSpec
from greenroom.sandbox.factory import ShippedSandboxes
async def main():
    sandbox = await ShippedSandboxes().open(SandboxSpec(kind={kind!r}, workspace={str(tmp_path / "ws")!r}), "r")
    await sandbox.execute("setsid sleep {marker} & nohup sleep {marker} & sleep {marker}")
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script])
    asyncio.run(until(lambda: len(alive(f"sleep\0{marker}")) >= 3, "all of it runs"))
    owner.kill()
    owner.wait()
    asyncio.run(until(lambda: alive(f"sleep\0{marker}") == [], "all of it is gone", 5))


async def test_no_descriptor_is_left_of_commands_whose_children_hold_their_pipe(sandbox: FolderSandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await sandbox.execute("setsid sleep 1.5 & echo started")
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all are closed once their trees are gone")


async def test_a_request_that_grows_when_it_is_written_goes_through(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute("printf %s '" + "\x01" * 60_000 + "' | wc -c")
    assert result.output.strip() == "60000"


async def test_files_stay_in_the_workspace(sandbox: FolderSandbox) -> None:
    await sandbox.write_file("a/b.txt", "hällo\r\n".encode())
    assert await sandbox.read_file("a/b.txt") == "hällo\r\n".encode()
    assert await sandbox.list_dir(".") == ("a/",)
    assert (await sandbox.execute("cat a/b.txt")).output == "hällo\r\n"


async def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    factory = ShippedSandboxes()
    with pytest.raises(SandboxUnavailable, match="no sandbox 'jail'") as unknown:
        await factory.open(SandboxSpec(kind="jail", workspace=str(tmp_path)), "r")
    assert "bubblewrap, host" in unknown.value.hint
    (tmp_path / "file").write_text("")
    for kind in ("host", "bubblewrap"):
        with pytest.raises(SandboxUnavailable, match="Not a directory"):
            await factory.open(SandboxSpec(kind=kind, workspace=str(tmp_path / "file" / "ws")), "r")
