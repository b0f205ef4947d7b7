"""Files below a folder, and nowhere else: every path is resolved as it is opened (beneath.py).

Checking a path and then opening it can be raced; opening it with the check inside cannot. Regular files only, and never
blocking on one that is not.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from greenroom.runtime.errors import PathRefused
from greenroom.sandbox.beneath import open_beneath


class RootedFiles:
    """The files below a folder, which is held open: moving it changes nothing.

    root: its path, as callers name it; folder: its descriptor, of which a copy is kept, instead of opening the path;
    owner: user and group that new files and folders belong to, None for this process's own.
    """

    def __init__(self, root: Path | str, *, folder: int | None = None, owner: tuple[int, int] | None = None) -> None:
        self._path = str(root)
        self.owner = owner
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._root = os.open(root, flags) if folder is None else os.dup(folder)

    def close(self) -> None:
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    @contextmanager
    def folder(self) -> Iterator[int]:
        """The folder itself, open for reading."""
        with self._opened(".", os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd

    def read(self, path: str, limit: int) -> bytes:
        """The file's bytes; raises PathRefused, FileNotFoundError, or OSError(EFBIG) beyond `limit` bytes."""
        with self._opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            info = os.fstat(fd)
            _refuse_irregular(path, info.st_mode)
            if info.st_size > limit:
                raise OSError(errno.EFBIG, f"the file has {info.st_size} bytes, more than {limit}", path)
            with os.fdopen(os.dup(fd), "rb") as file:
                return file.read(limit)

    def write(self, path: str, data: bytes) -> None:
        """Writes the file whole. Through a link below the root it writes the link's target, which is not atomic."""
        inner = self._inner(path)
        folder, name = os.path.split(inner)
        with self._folder(folder) as parent:
            try:
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            except FileNotFoundError:
                mode = None
            if mode is not None and stat.S_ISLNK(mode):
                self._write_through(path, inner, data)
                return
            if mode is not None:
                _refuse_irregular(path, mode)
            self._replace(parent, name, data, mode)

    def list(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted; folders end with a slash."""
        with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd, os.scandir(fd) as entries:
            return tuple(sorted(e.name + "/" if e.is_dir(follow_symlinks=False) else e.name for e in entries))

    def _write_through(self, path: str, inner: str, data: bytes) -> None:
        with self._opened(inner, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666) as fd:
            _refuse_irregular(path, os.fstat(fd).st_mode)
            if self.owner is not None:
                os.fchown(fd, *self.owner)
            _write_all(fd, data)

    def _replace(self, parent: int, name: str, data: bytes, old_mode: int | None) -> None:
        """A new file under a name of its own, then renamed over the old one: nobody sees half of it."""
        temporary = f".{name[:200]}.{secrets.token_hex(6)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o666 if old_mode is None else stat.S_IMODE(old_mode), dir_fd=parent)
        try:
            if self.owner is not None:
                os.fchown(fd, *self.owner)
            if old_mode is not None:
                os.fchmod(fd, stat.S_IMODE(old_mode))
            _write_all(fd, data)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
        finally:
            os.close(fd)

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        """The folder, opened; missing ones are made, one level at a time."""
        made = ""
        for part in folder.split("/") if folder else []:
            above, made = made, f"{made}/{part}" if made else part
            try:
                with self._opened(made, os.O_PATH | os.O_DIRECTORY):
                    continue
            except FileNotFoundError:
                with self._opened(above or ".", os.O_RDONLY | os.O_DIRECTORY) as parent:
                    try:
                        os.mkdir(part, dir_fd=parent)
                        if self.owner is not None:
                            os.chown(part, *self.owner, dir_fd=parent, follow_symlinks=False)
                    except FileExistsError:
                        pass  # somebody was faster, or it is a dangling link: opening it will tell
        with self._opened(folder or ".", os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd

    @contextmanager
    def _opened(self, path: str, flags: int, mode: int = 0) -> Iterator[int]:
        fd = self._open(path, self._inner(path), flags, mode)
        try:
            yield fd
        finally:
            os.close(fd)

    def _inner(self, path: str) -> str:
        """The path relative to the root; an absolute one only if it lies below it."""
        if "\0" in path or not path:
            raise PathRefused(f"{path!r} is no path")
        if path.startswith("/"):
            base = self._path.rstrip("/")
            if path.rstrip("/") != base and not path.startswith(base + "/"):
                raise PathRefused(f"{path!r} is outside the workspace", hint="Give a path relative to it")
            path = path[len(base) :].lstrip("/") or "."
        inner = os.path.normpath(path)
        if inner == ".." or inner.startswith("../"):
            raise PathRefused(f"{path!r} leaves the workspace", hint="Give a path inside it")
        return inner

    def _open(self, shown: str, inner: str, flags: int, mode: int) -> int:
        try:
            return open_beneath(self._root, inner, flags, mode)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):
                message = f"{shown!r} leads out of the workspace or in a circle"
                raise PathRefused(message, hint="Give a path inside it") from None
            if error.errno == errno.ENXIO:
                raise PathRefused(f"{shown!r} is no regular file") from None
            raise OSError(error.errno, os.strerror(error.errno or 0), shown) from None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _refuse_irregular(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise PathRefused(f"{path!r} is no regular file")
