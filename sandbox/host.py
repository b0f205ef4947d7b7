"""HostSandbox: commands on this machine as they are, in a workspace folder. No isolation whatsoever.

For a developer's own machine and trusted settings; it is chosen by name and never by default. What it does give: file
tools that stay in the workspace, an environment without this process's secrets, bounded output, whole-tree kills, and
nothing left running when its owner ends.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.folder import FolderSandbox, keeper_for, opened_workspace
from greenroom.sandbox.paths import RootedFiles

PASSED_ON = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "TZ")
"""Variables of this process that commands get; keys and tokens are not among them."""


class HostSandbox(FolderSandbox):
    kind = "host"

    @classmethod
    async def open(cls, workspace: Path, spec: SandboxSpec) -> HostSandbox:
        """Makes the workspace folder if it is missing; raises SandboxUnavailable."""
        if shutil.which("bash") is None:
            raise SandboxUnavailable("there is no bash on PATH", hint="Install bash")
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        with opened_workspace(workspace) as folder:
            files = RootedFiles(folder.path, folder=folder.fd)
        keeper = await keeper_for(files)
        inside, guarantees = str(folder.path), frozenset({"rooted_files"})
        return cls(
            folder.path, spec, keeper, files, guarantees=guarantees, inside=inside, python=sys.executable, env=env
        )
