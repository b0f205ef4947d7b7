"""Where things lie on this machine: the home folder, and a session tree's workspace in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.ids import encode_id

WORKSPACES = "workspaces"
RESTORING = ".greenroom-restoring"
"""A file that stands in a user's own folder for as long as it is being restored."""


def home() -> Path:
    """`GREENROOM_HOME`, else .greenroom in the working folder; absolute."""
    return Path(os.environ.get("GREENROOM_HOME") or ".greenroom").expanduser().absolute()


def managed_workspace(root: str) -> Path:
    """The workspace of a tree that names none of its own."""
    return home() / WORKSPACES / encode_id(root)


def remove_managed_workspace(root: str) -> None:
    """Removes a tree's managed workspace, if there is one; a user's own folder is never touched."""
    shutil.rmtree(managed_workspace(root), ignore_errors=True)
    _mark_of(managed_workspace(root)).unlink(missing_ok=True)


def _mark_of(workspace: Path) -> Path:
    return workspace.parents[1] / "marks" / workspace.name


def resolved_spec(spec: SandboxSpec, root: str) -> SandboxSpec:
    """The spec with an absolute workspace: `{home}/workspaces/{root}` unless it names one."""
    path = Path(spec.workspace).expanduser() if spec.workspace else managed_workspace(root)
    return spec.but(workspace=str(path.absolute()), managed=not spec.workspace)


class WorkspaceMark:
    """Says which sandboxes a managed workspace on this machine was used by: another machine may have gone on since.

    A user's own folder bears no mark: it is taken as it is, unless it is empty or was never wholly restored.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        assert spec.workspace is not None, "a session's spec is resolved"
        self._workspace = Path(spec.workspace)
        self._path = _mark_of(self._workspace) if spec.managed else None

    def is_of(self, incarnation: str | None) -> bool:
        """Whether the folder is as this sandbox left it; None: nobody had the tree before."""
        if incarnation is None:
            return True
        if self._path is None:
            names = set(os.listdir(self._workspace)) if self._workspace.is_dir() else set()
            return bool(names) and RESTORING not in names
        try:
            return self._workspace.is_dir() and incarnation in self._path.read_text().split()
        except FileNotFoundError:
            return False

    def put(self, incarnation: str) -> None:
        """The folder is this sandbox's; several may say so at once."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"\n{incarnation}\n")  # a line that was cut off by a crash spoils no other

    def remove(self) -> None:
        """The folder is nobody's: it is about to be replaced."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
