"""Where things lie on this machine: the home folder, and a session tree's workspace in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.ids import encode_id


def home() -> Path:
    """`GREENROOM_HOME`, else .greenroom in the working folder; absolute."""
    return Path(os.environ.get("GREENROOM_HOME") or ".greenroom").expanduser().absolute()


def managed_workspace(root: str) -> Path:
    """The workspace of a tree that names none of its own."""
    return home() / "workspaces" / encode_id(root)


def remove_managed_workspace(root: str) -> None:
    """Removes a tree's managed workspace, if there is one; a user's own folder is never touched."""
    shutil.rmtree(managed_workspace(root), ignore_errors=True)


def resolved_spec(spec: SandboxSpec, root: str) -> SandboxSpec:
    """The spec with an absolute workspace: `{home}/workspaces/{root}` unless it names one."""
    path = Path(spec.workspace).expanduser() if spec.workspace else managed_workspace(root)
    return spec.but(workspace=str(path.absolute()))
