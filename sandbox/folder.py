"""FolderSandbox: a workspace folder of this machine and a keeper that runs commands in it. The base of both kinds.

What a kind adds is how its keeper is started, where commands see the workspace, and what that enforces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.paths import RootedFiles
from greenroom.sandbox.process import Command, Keeper, run_to_end


class FolderSandbox:
    """`inside`: the workspace's path as commands see it; `python`: an interpreter that they have; `env`: all variables
    they start with; `owner`: see RootedFiles.
    """

    kind: str

    def __init__(
        self,
        workspace: Path,
        spec: SandboxSpec,
        keeper: Keeper,
        *,
        guarantees: frozenset[str],
        inside: str,
        python: str,
        env: Mapping[str, str],
        owner: tuple[int, int] | None = None,
    ) -> None:
        self.workspace = workspace
        self.guarantees = guarantees
        self.inside = inside
        self.python = python
        self._spec = spec
        self._keeper = keeper
        self._files = RootedFiles(workspace, seen_as=inside, owner=owner)
        self._env = {"LANG": "C.UTF-8", **env, "HOME": inside, "TERM": "dumb", **spec.env}

    @property
    def alive(self) -> bool:
        return self._keeper.alive

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult:
        return await run_to_end(self._run(command, timeout))

    async def start(self, command: str) -> Command:
        return self._run(command, None)

    def _run(self, command: str, timeout: float | None) -> Command:
        limits = self._spec.limits
        bounds = [seconds for seconds in (timeout, limits.max_seconds) if seconds]
        return self._keeper.run(command, self.inside, self._env, min(bounds) if bounds else None, limits)

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


def made_workspace(workspace: Path) -> Path:
    """The workspace folder, made if it is missing, its path without links; raises SandboxUnavailable."""
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        found = workspace.resolve()
        if not found.is_dir():
            raise NotADirectoryError(20, "Not a directory")
    except OSError as error:
        raise SandboxUnavailable(
            f"the workspace {workspace} cannot be used: {error.strerror}", hint="Choose another folder"
        ) from error
    return found
