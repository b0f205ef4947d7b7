"""HostSandbox: commands on this machine as they are, in a workspace folder. No isolation whatsoever.

For a developer's own machine and trusted settings; it is chosen by name and never by default. What it does give: file
tools that stay in the workspace, an environment without this process's secrets, bounded output, whole-tree kills, and
nothing left running when its owner ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.paths import RootedFiles
from greenroom.sandbox.process import Keeper

PASSED_ON = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "TZ")
"""Variables of this process that commands get; keys and tokens are not among them."""

MAX_INLINE_COMMAND = 64 * 1024
"""Bytes; the kernel takes no longer argument than 128 KiB, so a longer command goes through a file."""


class HostSandbox:
    kind = "host"
    guarantees: frozenset[str] = frozenset({"rooted_files"})

    def __init__(self, workspace: Path, spec: SandboxSpec, keeper: Keeper, files: RootedFiles) -> None:
        self.workspace = workspace
        self._spec = spec
        self._keeper = keeper
        self._files = files

    @classmethod
    async def open(cls, workspace: Path, spec: SandboxSpec) -> HostSandbox:
        """Makes the workspace folder if it is missing; raises SandboxUnavailable."""
        if shutil.which("bash") is None:
            raise SandboxUnavailable("there is no bash on PATH", hint="Install bash")
        try:
            workspace.mkdir(parents=True, exist_ok=True)
            files = RootedFiles(workspace.resolve())
        except OSError as error:
            raise SandboxUnavailable(
                f"the workspace {workspace} cannot be used: {error.strerror}", hint="Choose another folder"
            ) from error
        return cls(workspace.resolve(), spec, await Keeper.start(), files)

    @property
    def alive(self) -> bool:
        return self._keeper.alive

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult:
        limits = self._spec.limits
        bounds = [seconds for seconds in (timeout, limits.max_seconds) if seconds]
        script = None
        argv = ["bash", "-c", command]
        try:
            if len(command.encode("utf-8", "surrogateescape")) > MAX_INLINE_COMMAND:
                script = await asyncio.to_thread(_write_script, command)
                argv = ["bash", script]
            return await self._keeper.run(
                argv, str(self.workspace), self._environment(), min(bounds) if bounds else None, limits
            )
        finally:
            if script is not None:
                os.unlink(script)

    async def read_file(self, path: str) -> bytes:
        return await asyncio.to_thread(self._files.read, path, self._spec.limits.max_file_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._files.write, path, data)

    async def list_dir(self, path: str) -> tuple[str, ...]:
        return await asyncio.to_thread(self._files.list, path)

    async def close(self) -> None:
        """Harmless when called again."""
        await self._keeper.close()
        self._files.close()

    def _environment(self) -> Mapping[str, str]:
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {"LANG": "C.UTF-8", **passed, "HOME": str(self.workspace), "TERM": "dumb", **self._spec.env}


def _write_script(command: str) -> str:
    fd, name = tempfile.mkstemp(prefix="greenroom-", suffix=".sh")
    with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(command)
    return name
