"""Both kinds keep the contract of a sandbox, and sandboxes that break it are found out."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom import ExecResult, SandboxSpec
from greenroom.sandbox.factory import ShippedSandboxes
from greenroom.sandbox.host import HostSandbox
from greenroom.testing import ContractBroken, check_sandbox


@pytest.mark.parametrize("kind", ["host", "bubblewrap"])
async def test_the_shipped_kinds_keep_the_contract(kind: str, tmp_path: Path) -> None:
    numbers = itertools.count()

    async def open() -> Any:
        workspace = str(tmp_path / f"ws-{next(numbers)}")
        return await ShippedSandboxes().open(SandboxSpec(kind=kind, workspace=workspace), "r")

    await check_sandbox(open)


class WaitsForThePipe(HostSandbox):
    """Ends when the pipe closes, as a plain subprocess does."""

    async def execute(self, command: str, *, timeout: float | None = None, cwd: str | None = None) -> ExecResult:
        if "sleep 300 & echo done" not in command:
            return await super().execute(command, timeout=timeout, cwd=cwd)
        done = subprocess.run(  # the mistake is the point
            command.replace("sleep 300 & echo done", "sleep 6 & echo done"),
            shell=True,
            executable="/bin/bash",
            cwd=self.workspace,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return ExecResult(status="exited", exit_code=done.returncode, output=done.stdout.decode())


class Boasts(HostSandbox):
    """Says that it has no network, and has one."""

    @classmethod
    async def open(cls, workspace: Path, spec: SandboxSpec) -> Any:
        sandbox = await super().open(workspace, spec)
        sandbox.guarantees |= {"no_network"}
        return sandbox


class FollowsLinks(HostSandbox):
    async def read_file(self, path: str) -> bytes:
        if path == "link":
            return (self.workspace / path).read_bytes()
        return await super().read_file(path)


class LosesItsMode(HostSandbox):
    async def write_file(self, path: str, data: bytes) -> None:
        await super().write_file(path, data)
        (self.workspace / path).chmod(0o600)


class LeavesAJob(HostSandbox):
    async def start(self, command: str, *, cwd: str | None = None) -> Any:
        return await super().start(command.replace("sleep 0.5; echo b; exit 7", "echo b"), cwd=cwd)


class NeverSeesAChange(HostSandbox):
    async def pack(self, base: Any, name: str) -> Any:
        return await super().pack(None, name) if base is None else None


class SavesAlways(HostSandbox):
    async def pack(self, base: Any, name: str) -> Any:
        return await super().pack(None, name)


BROKEN: list[tuple[type[HostSandbox], str]] = [
    (WaitsForThePipe, "ends with its own process"),
    (Boasts, "reaches no server"),
    (FollowsLinks, "is refused"),
    (LosesItsMode, "mode bits"),
    (LeavesAJob, "running process has no end|end is true"),
    (NeverSeesAChange, "one that has changed is"),
    (SavesAlways, "not changed is not saved again"),
]


@pytest.mark.parametrize(("broken", "promise"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_sandbox_that_breaks_a_promise_is_found_out(
    broken: type[HostSandbox], promise: str, tmp_path: Path
) -> None:
    numbers = itertools.count()

    async def open() -> Any:
        return await broken.open(tmp_path / f"ws-{next(numbers)}", SandboxSpec(kind="host"))

    opens: Callable[[], Awaitable[Any]] = open
    with pytest.raises(ContractBroken, match=promise):
        await check_sandbox(opens)
