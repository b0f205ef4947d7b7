"""From root to somebody without rights, with some folders of root's taken along. Run by itself (python -I -S).

    unprivileged.py UID GID STAGE SOURCES COMMAND...

In a mount namespace of its own it lays a small file system over STAGE, binds each source (JSON, a list of
[SOURCE, NAME, DEVICE:INODE or null]) to STAGE/NAME, drops root for good and becomes COMMAND. So a sandbox may work in
folders below /root, which nobody else can enter, without anything in it ever being root on this machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        number = ctypes.get_errno()
        sys.exit(f"mount of {source} on {target}: {os.strerror(number)}")


def opened(source: str, identity: str | None) -> int:
    """The folder; ends everything if it must be a certain one and is not."""
    fd = os.open(source, os.O_PATH | os.O_DIRECTORY)
    info = os.fstat(fd)
    if identity not in (None, f"{info.st_dev}:{info.st_ino}"):
        sys.exit(f"{source} is not the folder any more that it was")
    return fd


def main() -> None:
    uid, gid, stage, sources, *command = sys.argv[1:]
    if libc.unshare(CLONE_NEWNS) != 0:
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    mount("none", "/", "", MS_REC | MS_SLAVE)
    found = [(opened(source, identity), name) for source, name, identity in json.loads(sources)]
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for fd, name in found:
        os.makedirs(f"{stage}/{name}")
        mount(f"/proc/self/fd/{fd}", f"{stage}/{name}", "", MS_BIND)
        os.close(fd)
    os.setgroups([])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
