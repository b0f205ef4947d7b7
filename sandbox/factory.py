"""ShippedSandboxes: the SandboxFactory of the kinds that come with Greenroom. Never falls back to a weaker kind."""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.runtime.ports import Sandbox
from greenroom.runtime.storage.snapshots import Saved
from greenroom.sandbox.bubblewrap import REMEDY, BubblewrapSandbox, find_bubblewrap, owner_of_restored
from greenroom.sandbox.host import HostSandbox
from greenroom.sandbox.probe import Opens, refuse_unless_it_holds
from greenroom.sandbox.saving import restore

KINDS: dict[str, Opens] = {"bubblewrap": BubblewrapSandbox.open, "host": HostSandbox.open}
"""How each kind is opened, the isolating ones first."""

_proved: set[tuple[Path, int, bool]] = set()
"""The bwrap, the user of this process, and whether with a network: what has been tried and found to isolate."""


class ShippedSandboxes:
    async def open(self, spec: SandboxSpec, root: str, snapshot: Saved | None = None) -> Sandbox:
        """Raises SandboxUnavailable with what to do about it; StorageError or SandboxError for a damaged snapshot."""
        if spec.kind not in KINDS:
            raise SandboxUnavailable(f"there is no sandbox {spec.kind!r}", hint=f"One of {', '.join(KINDS)}")
        if spec.workspace is None:
            raise SandboxUnavailable("the session has no workspace folder", hint="Give SandboxSpec(workspace=...)")
        workspace = Path(spec.workspace)
        if spec.kind == "bubblewrap":
            await _prove(network=spec.network)
        if snapshot is not None:
            owner = owner_of_restored(workspace) if spec.kind == "bubblewrap" else None
            await restore(snapshot, workspace, owner, spec.limits.snapshot_bytes)
        return await (BubblewrapSandbox if spec.kind == "bubblewrap" else HostSandbox).open(workspace, spec)


async def _prove(*, network: bool) -> None:
    """Tries the isolation once per process; what has failed is tried again, since somebody may have mended it."""
    proof = (find_bubblewrap().path, os.geteuid(), network)
    if proof not in _proved:
        await refuse_unless_it_holds(BubblewrapSandbox.open, "bubblewrap", REMEDY, network=network)
        _proved.add(proof)
