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
from greenroom.sandbox.folder import FolderSandbox, made_workspace
from greenroom.sandbox.process import Keeper

PASSED_ON = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "TZ")
"""Variables of this process that commands get; keys and tokens are not among them."""


class HostSandbox(FolderSandbox):
    kind = "host"

    @classmethod
    async def open(cls, workspace: Path, spec: SandboxSpec) -> HostSandbox:
        """Makes the workspace folder if it is missing; raises SandboxUnavailable."""
        if shutil.which("bash") is None:
            raise SandboxUnavailable("there is no bash on PATH", hint="Install bash")
        folder = made_workspace(workspace)
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        guarantees = frozenset({"rooted_files"})
        keeper = await Keeper.start()
        return cls(folder, spec, keeper, guarantees=guarantees, inside=str(folder), python=sys.executable, env=env)
