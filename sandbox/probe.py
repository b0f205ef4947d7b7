"""What a sandbox really holds: an attacker's script runs in it and tells how far it came. Nothing is taken on trust.

The bubblewrap kind is refused unless every check holds; `greenroom sandbox check` shows the table for each kind.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from greenroom.runtime.calls import ExecResult, SandboxSpec
from greenroom.runtime.errors import SandboxError, SandboxUnavailable

ATTACK = Path(__file__).with_name("attack.py")
ATTACK_TIMEOUT = 30.0

MEANING = {
    "host_user": "commands are not root on this machine",
    "namespaces": "processes, network, IPC, host name and mounts are the sandbox's own",
    "host_processes": "processes of this machine can be neither seen nor signalled",
    "loopback": "servers on this machine's loopback cannot be reached",
    "abstract_socket": "nor through abstract unix sockets",
    "path_socket": "nor through unix sockets in the file system",
    "read_outside": "files outside the workspace cannot be read",
    "write_outside": "nor written",
    "environment": "variables of the runtime cannot be seen",
    "seccomp": "dangerous system calls are filtered and no program gains rights",
    "vsock": "the machine's own hypervisor socket cannot be opened",
    "ptrace": "other processes cannot be traced",
    "user_namespace": "no further user namespace can be made",
    "io_uring": "io_uring is not there",
    "keyctl": "the kernel's keys cannot be reached",
    "capabilities": "commands have no capabilities",
    "mounts": "nothing of this machine is mounted but what belongs there, nothing writable but the sandbox's own",
}
"""Every check, and what it means when it holds."""


GIVEN_BY_NETWORK = ("loopback",)

OUTSIDE = ("/tmp", "/var/tmp", "/var/lib", "/srv", "/home", "/opt", "/dev/shm")
"""Where a secret is laid down to be looked for, as far as this process may write there."""


class Probed(Protocol):
    """A sandbox as far as the probe uses it."""

    workspace: Path
    inside: str
    python: str

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def close(self) -> None: ...


class Opens(Protocol):
    async def __call__(self, workspace: Path, spec: SandboxSpec) -> Probed: ...


@dataclass(frozen=True, slots=True)
class Check:
    """`holds`: whether the attack failed; `detail`: how it went."""

    name: str
    holds: bool
    detail: str

    @property
    def meaning(self) -> str:
        return MEANING[self.name]


async def probe(open: Opens, kind: str, *, network: bool = False) -> list[Check]:
    """Opens a sandbox of its own and attacks it from within; raises SandboxUnavailable when it does not open.

    network: try one that shares this machine's; what that gives away by intention is then no check.
    """
    with tempfile.TemporaryDirectory(prefix="greenroom-probe-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        sandbox = await open(root / "workspace", SandboxSpec(kind=kind, network=network))
        try:
            with _targets(root, network=network) as targets:
                await sandbox.write_file("attack.py", ATTACK.read_bytes())
                told = json.dumps({**targets, "workspace": sandbox.inside})
                await sandbox.write_file("targets.json", told.encode())
                result = await sandbox.execute(f"{sandbox.python} -I -S attack.py", timeout=ATTACK_TIMEOUT)
                checks = _checks(result, root / "workspace", targets)
            return [check for check in checks if not (network and check.name in GIVEN_BY_NETWORK)]
        except (OSError, SandboxError) as error:  # it is no sandbox at all
            return [Check(name, holds=False, detail=str(error)) for name in MEANING]
        finally:
            await sandbox.close()


async def refuse_unless_it_holds(open: Opens, kind: str, hint: str, *, network: bool) -> None:
    """Raises SandboxUnavailable naming what does not hold."""
    broken = [check for check in await probe(open, kind, network=network) if not check.holds]
    if broken:
        told = "; ".join(f"not so: {check.meaning} ({check.detail})" for check in broken)
        raise SandboxUnavailable(f"the sandbox {kind!r} does not isolate on this machine: {told}", hint=hint)


@contextmanager
def _targets(root: Path, *, network: bool) -> Iterator[dict[str, Any]]:
    """What the attack is to reach: sockets, secrets, a process and a variable of this machine."""
    mark = secrets.token_hex(8)
    variable = f"GREENROOM_PROBE_{mark}"
    os.environ[variable] = mark
    with ExitStack() as stack:
        stack.callback(os.environ.pop, variable, None)
        hidden = [path for folder in (root, *OUTSIDE, Path.home()) if (path := _laid(stack, folder, mark)) is not None]
        loopback = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract, named = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        abstract.bind(f"\0greenroom-{mark}")
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        named.bind(f"/proc/self/fd/{folder}/socket")  # its own path may be too long for an address
        (root / "socket").chmod(0o777)
        for server in (abstract, named):
            server.listen(1)
        kinds = ("user", "pid", "ipc", "uts", "mnt", *(() if network else ("net",)))
        yield {
            "mark": mark,
            "pid": os.getpid(),
            "started": Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19],
            "port": loopback.getsockname()[1],
            "abstract": f"greenroom-{mark}",
            "socket": str(root / "socket"),
            "secrets": hidden,
            "outside": [f"{path}.written" for path in hidden],
            "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds},
        }


def _laid(stack: ExitStack, folder: Path | str, mark: str) -> str | None:
    """A file that anybody may read, gone at the end; None where this process may write none."""
    path = Path(folder, f".greenroom-probe-{mark}")
    try:
        path.write_text(mark)
    except OSError:
        return None
    stack.callback(path.unlink)
    stack.callback(Path(f"{path}.written").unlink, missing_ok=True)
    path.chmod(0o644)
    return str(path)


def _checks(result: ExecResult, workspace: Path, targets: Mapping[str, Any]) -> list[Check]:
    try:
        told = json.loads(result.output)
        holds = {name: Check(name, told[name][0] is True, str(told[name][1])[:200]) for name in MEANING if name in told}
    except (ValueError, KeyError, TypeError, IndexError):
        detail = f"the attack did not end: {result.status} {result.exit_code} {result.output[-300:]}"
        return [Check(name, holds=False, detail=detail) for name in MEANING]
    left = workspace / "made"
    uid = left.stat().st_uid if left.exists() else None
    holds["host_user"] = Check("host_user", uid not in (None, 0), f"files it makes belong to user {uid}")
    written = [path for path in targets["outside"] if Path(path).exists()]
    holds["write_outside"] = Check("write_outside", not written, f"of its files are there: {written or 'none'}")
    return [holds.get(name, Check(name, holds=False, detail="was not tried")) for name in MEANING]


async def tables(kinds: Mapping[str, Opens]) -> dict[str, list[Check] | SandboxUnavailable]:
    """The checks of each kind, or why it does not open."""
    found: dict[str, list[Check] | SandboxUnavailable] = {}
    for kind, open in kinds.items():
        try:
            found[kind] = await probe(open, kind)
        except SandboxUnavailable as error:
            found[kind] = error
    return found
