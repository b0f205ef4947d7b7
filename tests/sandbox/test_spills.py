"""Output that is too long to keep goes to a file in the sandbox, within bounds, and is gone with it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scenes import until

from greenroom import SandboxLimits, SandboxSpec
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.folder import FolderSandbox

LIMITS = SandboxLimits(output_head=1000, output_tail=2000, spill_bytes=300_000, tmp_bytes=4 * 1024 * 1024)


@pytest.fixture(params=["host", "bubblewrap"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FolderSandbox]:
    spec = SandboxSpec(kind=request.param, workspace=str(tmp_path / "ws"), limits=LIMITS)
    opened = await ShippedSandboxes().open(spec, "r")
    assert isinstance(opened, FolderSandbox)
    yield opened
    await opened.close()


def file_in(output: str) -> str:
    """The file that the output names."""
    found = re.search(r"in (/tmp/output-\S+\.txt) ", output)
    assert found, output[:200]
    return found.group(1)


async def test_all_of_a_long_output_can_be_read_later(sandbox: FolderSandbox) -> None:
    for last in (1000, 40_000):
        result = await sandbox.execute(f"seq 1 {last}")
        assert result.output.startswith("1\n2\n")
        assert result.output.endswith(f"\n{last}\n")
        assert result.dropped_bytes == len("".join(f"{n}\n" for n in range(1, last + 1))) - 3000
        path = file_in(result.output)
        assert (await sandbox.execute(f"seq 1 {last} | cmp - {path} && wc -l < {path}")).output == f"{last}\n"


async def test_a_short_output_makes_no_file(sandbox: FolderSandbox) -> None:
    assert "bytes" not in (await sandbox.execute("head -c 3000 /dev/zero | tr '\\0' x")).output
    assert (await sandbox.execute("cat /tmp/output-*.txt 2> /dev/null | wc -c")).output == "0\n"


async def test_the_file_is_bounded_and_so_is_their_number(sandbox: FolderSandbox) -> None:
    result = await sandbox.execute("head -c 50000000 /dev/zero | tr '\\0' x")
    path = file_in(result.output)
    assert "the first 300000 are" in result.output
    assert result.dropped_bytes == 50_000_000 - 3000
    assert (await sandbox.execute(f"wc -c < {path}")).output == "300000\n"
    paths = [file_in((await sandbox.execute("seq 1 2000")).output) for _ in range(9)]
    there = (await sandbox.execute("ls " + " ".join([path, *paths]) + " 2> /dev/null")).output.split()
    assert there == sorted(paths[1:])


async def test_a_full_room_costs_the_rest_of_the_file_and_nothing_else(tmp_path: Path) -> None:
    limits = LIMITS.but(tmp_bytes=100_000)
    spec = SandboxSpec(kind="bubblewrap", workspace=str(tmp_path / "ws"), limits=limits)
    sandbox = await ShippedSandboxes().open(spec, "r")
    try:
        result = await sandbox.execute("seq 1 100000")
        assert result.ok
        assert result.output.endswith("\n100000\n")
        assert int((await sandbox.execute(f"wc -c < {file_in(result.output)}")).output) <= 106_496
        full = await sandbox.execute("head -c 1000000 /dev/zero > /tmp/full; seq 1 2000")
        assert full.output.endswith("\n2000\n")
    finally:
        await sandbox.close()


async def test_a_jobs_output_goes_there_as_it_comes(sandbox: FolderSandbox) -> None:
    job = await sandbox.start("seq 1 2000; read -t 300 < <(sleep 300)")
    while True:
        await job.news(5)
        text, dropped = job.take()
        if dropped:
            break
    path = file_in(text)
    assert (await sandbox.execute(f"seq 1 2000 | cmp - {path} && echo same")).output == "same\n"
    await job.kill()


async def test_none_is_asked_for_where_none_is_wanted(tmp_path: Path) -> None:
    spec = SandboxSpec(kind="host", workspace=str(tmp_path / "ws"), limits=LIMITS.but(spill_bytes=0))
    sandbox = await ShippedSandboxes().open(spec, "r")
    result = await sandbox.execute("seq 1 2000")
    await sandbox.close()
    assert "bytes dropped ...]" in result.output


async def test_many_that_spill_at_once_mix_nothing_up(sandbox: FolderSandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    results = await asyncio.gather(*(sandbox.execute(f"seq {n}00000 {n}02000") for n in range(1, 7)))
    for number, result in enumerate(results, start=1):
        check = await sandbox.execute(f"seq {number}00000 {number}02000 | cmp - {file_in(result.output)} && echo same")
        assert check.output == "same\n"
    assert len(os.listdir("/proc/self/fd")) <= before


SPILLS = """
import asyncio, sys
from greenroom import SandboxSpec
from greenroom.sandbox.factory import ShippedSandboxes
async def main():
    sandbox = await ShippedSandboxes().open(SandboxSpec(kind="host", workspace=sys.argv[1]), "r")
    print((await sandbox.execute("seq 1 100000")).output, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def spilled_and_killed(workspace: Path) -> str:
    """The file of an owner that was killed."""
    with subprocess.Popen([sys.executable, "-c", SPILLS, str(workspace)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = next(file_in(line) for line in owner.stdout if "bytes dropped" in line)
        assert Path(path).exists()
        owner.kill()
    return path


async def test_the_files_go_with_the_sandbox_also_when_its_owner_is_killed(tmp_path: Path) -> None:
    sandbox = await ShippedSandboxes().open(SandboxSpec(kind="host", workspace=str(tmp_path / "a")), "r")
    path = Path(file_in((await sandbox.execute("seq 1 100000")).output))
    assert path.exists()
    await sandbox.close()
    assert not path.exists()
    left = Path(await asyncio.to_thread(spilled_and_killed, tmp_path / "b"))
    await until(lambda: not left.exists(), "the keeper removes what it made")
