"""Opens a path below a folder, following links only as far as they stay below it.

The kernel does it in one call (openat2, RESOLVE_BENEATH). Where it has no such call, or a filter denies it, the path is
walked here, one name at a time, each opened in the folder before it and never followed: slower, and no easier to race.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections import deque

SYS_OPENAT2 = 437  # the same number on every architecture Linux has
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08
OPEN_ATTEMPTS = 16
"""Times an open is repeated when the kernel, or the walk, saw the tree change under it."""

MAX_LINKS = 40
"""Links on the way to one file, as the kernel has it."""

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]  # ctypes reads it so


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of `path`, relative to the open folder `root`.

    Raises OSError: EXDEV when it leads out, ELOOP for a circle of links, EAGAIN when the tree does not come to rest.
    """
    for _ in range(OPEN_ATTEMPTS):
        try:
            if kernel_can():
                return _openat2(root, path, flags, mode)
            return _walk(root, path, flags | os.O_CLOEXEC, mode)
        except BlockingIOError:  # EAGAIN
            continue
    raise OSError(errno.EAGAIN, "the folder kept changing", path)


@functools.cache
def kernel_can() -> bool:
    """Whether there is an openat2 that answers."""
    here = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        os.close(_openat2(here, ".", os.O_PATH, 0))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return False
        raise
    finally:
        os.close(here)
    return True


def _openat2(root: int, path: str, flags: int, mode: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    fd = int(_libc.syscall(SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd


def _walk(root: int, path: str, flags: int, mode: int) -> int:
    names, links = deque(path.split("/")), 0
    folders = [os.dup(root)]
    try:
        while names:
            name = names.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                os.close(folders.pop())
                continue
            try:
                there = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folders[-1])
            except FileNotFoundError:
                if not names and flags & os.O_CREAT:
                    return _last(folders[-1], name, flags, mode)
                raise
            kind = os.fstat(there).st_mode
            if stat.S_ISDIR(kind):
                folders.append(there)
            elif stat.S_ISLNK(kind):
                target = _target(there, path)
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                names.extendleft(reversed(target.split("/")))
            else:
                os.close(there)
                if names:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                return _last(folders[-1], name, flags, mode)
        return os.open(".", flags, mode, dir_fd=folders[-1])
    finally:
        for fd in folders:
            os.close(fd)


def _target(link: int, path: str) -> str:
    """Where a link leads, which is closed; an absolute target leads out."""
    try:
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    if target.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    return target


def _last(folder: int, name: str, flags: int, mode: int) -> int:
    """Opens what was no link a moment ago; a link that has come since is looked at again."""
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), name) from None
        raise
    if flags & os.O_PATH and stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)
    return fd
