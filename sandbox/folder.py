"""FolderSandbox: a workspace folder of this machine and a keeper that runs commands in it. The base of both kinds.

What a kind adds is how its keeper is started, where commands see the workspace, and what that enforces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from greenroom.runtime.calls import ExecResult, SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.runtime.storage.snapshots import Saved
from greenroom.sandbox.command import Command, run_to_end
from greenroom.sandbox.paths import RootedFiles
from greenroom.sandbox.process import Keeper, Launch
from greenroom.sandbox.saving import Packed, load, pack_folder, roomy, to_its_end
from greenroom.sandbox.workspace import Archive, copy


class FolderSandbox:
    """`files`: of the workspace; `inside`: its path as commands see it; `python`: an interpreter that they have; `env`:
    all variables they start with.
    """

    kind: str

    def __init__(
        self,
        workspace: Path,
        spec: SandboxSpec,
        keeper: Keeper,
        files: RootedFiles,
        *,
        guarantees: frozenset[str],
        inside: str,
        python: str,
        env: Mapping[str, str],
    ) -> None:
        self.workspace = workspace
        self.guarantees = guarantees
        self.inside = inside
        self.python = python
        self._spec = spec
        self._keeper = keeper
        self._files = files
        self._known: tuple[str | None, Archive] = (None, Archive())  # a snapshot's name, and what it holds
        self._env = {"LANG": "C.UTF-8", **env, "HOME": inside, "TERM": "dumb", **spec.env}

    @property
    def alive(self) -> bool:
        return self._keeper.alive

    async def execute(self, command: str, *, timeout: float | None = None, cwd: str | None = None) -> ExecResult:
        return await run_to_end(self._run(command, timeout, cwd))

    async def start(self, command: str, *, cwd: str | None = None) -> Command:
        return self._run(command, None, cwd)

    def _run(self, command: str, timeout: float | None, cwd: str | None) -> Command:
        limits = self._spec.limits
        bounds = [seconds for seconds in (timeout, limits.max_seconds) if seconds]
        places = (cwd or self.inside, self.inside)
        return self._keeper.run(command, places, self._env, min(bounds) if bounds else None, limits)

    async def read_file(self, path: str) -> bytes:
        return await asyncio.to_thread(self._files.read, path, self._spec.limits.max_file_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._files.write, path, data)

    async def list_dir(self, path: str) -> tuple[str, ...]:
        return await asyncio.to_thread(self._files.list, path)

    async def pack(self, base: Saved | None, name: str) -> Packed | None:
        """See SavesWorkspace. What runs stands still while the folder is read."""
        snapshot = None if base is None else base.snapshot
        if base is None:
            self._known = None, Archive()
        elif self._known[0] != base.snapshot.name:
            self._known = base.snapshot.name, await load(base)
        known = self._known[1]
        if self._keeper.busy:
            known.seen = {}  # a page of a file that is mapped can change without its times telling
        limit, near = self._spec.limits.snapshot_bytes, roomy(self.workspace)
        async with self._keeper.stopped():
            with self._files.folder() as fd:
                packed = await to_its_end(pack_folder, fd, known, snapshot, name, limit, near)
        if packed is not None:
            self._known = name, packed.archive
        return packed

    async def fork(self, folder: Path) -> None:
        """Copies the workspace into a new folder, which must not exist; blocks are shared where that is possible."""
        owner = self._files.owner
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with self._keeper.stopped():
                with self._files.folder() as source:
                    await to_its_end(copy, source, target, owner)
            if owner is not None:
                os.fchown(target, *owner)
        except BaseException:
            await to_its_end(partial(shutil.rmtree, folder, ignore_errors=True))
            raise
        finally:
            os.close(target)

    async def close(self) -> None:
        """Harmless when called again."""
        await self._keeper.close()
        self._files.close()


async def keeper_for(files: RootedFiles, launch: Launch | None = None) -> Keeper:
    """A running keeper; when there is none, the files are closed. Raises SandboxUnavailable."""
    try:
        return await Keeper.start(launch)
    except BaseException:
        files.close()
        raise


@dataclass(slots=True)
class Workspace:
    """A workspace folder, held open: whatever becomes of its path, this one is meant. `made`: by us, just now."""

    path: Path
    fd: int
    made: bool

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def opened_workspace(workspace: Path) -> Iterator[Workspace]:
    """The folder, made if it is missing, its path without links; raises SandboxUnavailable."""
    try:
        with contextlib.suppress(FileExistsError):  # no folder, perhaps: opening it tells
            workspace.parent.mkdir(parents=True, exist_ok=True)
        parent = os.open(workspace.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = _made_or_found(workspace, parent)
        finally:
            os.close(parent)
    except OSError as error:
        raise SandboxUnavailable(
            f"the workspace {workspace} cannot be used: {error.strerror}", hint="Choose another folder"
        ) from error
    try:
        yield found
    finally:
        found.close()


def _made_or_found(workspace: Path, parent: int) -> Workspace:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        os.mkdir(workspace.name, dir_fd=parent)
    except FileExistsError:
        return Workspace(workspace.resolve(), os.open(workspace, flags), made=False)
    fd = os.open(workspace.name, flags | os.O_NOFOLLOW, dir_fd=parent)
    mine = os.fstat(fd).st_uid == os.geteuid() and not os.listdir(fd)  # else somebody was there in between
    return Workspace(workspace.resolve(), fd, made=mine)
