"""A workspace folder as a tree of entries: read into an archive, written from one, copied. Plain files, no store.

An archive is two things: the index, which says what is in the folder (folders, links, and each file's hash), and
streams, tar files under zstd that hold contents. A later archive holds only the contents that changed; its index says
for every file in which stream it lies. What is neither file, folder nor link is left out and counted.

What is read from a stream is believed only as far as the index says the same, and the index only as far as it stays
below the folder: nothing is followed, nothing is written over, links are made last.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast

import zstandard

from greenroom.runtime.errors import SandboxError

MAX_ENTRIES = 1_000_000
MAX_DEPTH = 200
"""Folders within folders."""

MAX_PATH = 4000
"""Bytes of a path below the folder; the kernel takes no longer one at once than 4096."""

MAX_PATH_BYTES = 128 * 1024 * 1024
"""Bytes of all paths and link targets together: so long an index is kept in memory."""

MAX_INDEX_BYTES = 1 << 30
LEVEL = 3
"""Of zstd: beyond it the time doubles for a few percent."""

RACY_NS = 50_000_000
"""A file that changed so shortly before it was looked at may change again without its times telling."""

KEPT_MODE = 0o1777
"""Permission bits that are given back; a file that takes on its owner's rights is not."""

_FICLONE = 0x40049409  # the file system shares the blocks until one side changes them
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """kind: "d", "f" or "l"; mode: permission bits; content: a file's SHA-256 or a link's target.

    Of files: mtime_ns, size, and the name of the stream where the bytes lie.
    """

    kind: str
    mode: int
    mtime_ns: int = 0
    size: int = 0
    content: str = ""
    stream: str = ""


Index = dict[str, Entry]
"""By path below the folder; a folder stands before what is in it."""

Signature = tuple[int, int, int, int]


@dataclass(slots=True)
class Archive:
    """What was read of a folder, or is known of one.

    seen: what files looked like, by path, so that the next time they need not be read; size: bytes of all files;
    skipped: entries that no archive holds; packed: bytes that went into the new stream, before compression.
    """

    index: Index = field(default_factory=dict)
    seen: dict[str, Signature] = field(default_factory=dict)
    size: int = 0
    skipped: int = 0
    packed: int = 0


def encode_index(index: Index) -> bytes:
    """One JSON line per entry, under zstd."""
    lines = (
        json.dumps([path, e.kind, e.mode, e.mtime_ns, e.size, e.content, e.stream], separators=(",", ":"))
        for path, e in index.items()
    )
    return zstandard.ZstdCompressor(level=LEVEL).compress("\n".join(lines).encode())


def decode_index(body: bytes) -> Index:
    """Raises SandboxError for one that no folder can have."""
    index: Index = {}
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            text = reader.read(MAX_INDEX_BYTES)
        if len(text) == MAX_INDEX_BYTES:
            raise damaged(f"an index of more than {MAX_INDEX_BYTES} bytes")
        for line in text.decode().splitlines():
            path, kind, mode, mtime_ns, size, content, stream = json.loads(line)
            entry = Entry(str(kind), int(mode), int(mtime_ns), int(size), str(content), str(stream))
            _check(str(path), entry, index)
            index[str(path)] = entry
    except (ValueError, TypeError, zstandard.ZstdError) as error:
        raise damaged(str(error)) from error
    return index


def _check(path: str, entry: Entry, index: Index) -> None:
    parts, above = path.split("/"), path.rpartition("/")[0]
    if "\0" in path or len(os.fsencode(path)) > MAX_PATH or any(part in ("", ".", "..") for part in parts):
        raise damaged(f"the path {path!r}")
    if path in index or (above and (above not in index or index[above].kind != "d")):
        raise damaged(f"{path!r} is there twice, or in no folder")
    bad_link = entry.kind == "l" and ("\0" in entry.content or not entry.content)
    if entry.kind not in ("d", "f", "l") or entry.size < 0 or bad_link:
        raise damaged(f"the entry {path!r}")
    if len(index) >= MAX_ENTRIES:
        raise damaged(f"more than {MAX_ENTRIES} entries")


def damaged(what: str) -> SandboxError:
    return SandboxError(f"the snapshot is damaged: {what}", hint="Restore the store from a backup")


# -- from the folder


def pack(folder: int, base: Archive, stream: str, out: IO[bytes], limit: int) -> Archive:
    """Reads the folder; the contents that `base` does not hold go into `out`, as the stream of this name.

    Raises SandboxError when the files have more than `limit` bytes, or there are too many.
    """
    made = Archive()
    with zstandard.ZstdCompressor(level=LEVEL, threads=2).stream_writer(out, closefd=False) as compressed:
        packing = _Packing(base, made, compressed, stream, limit)
        for path, parent, name, info in _walk(folder, made):
            packing.add(path, parent, name, info)
        packing.finish()
    return made


class _Packing:
    """One reading of a folder into `made`; see pack()."""

    def __init__(self, base: Archive, made: Archive, out: Any, stream: str, limit: int) -> None:
        self._base = base
        self._made = made
        self._out = out
        self._stream = stream
        self._limit = limit
        self._path_bytes = 0
        self._began = time.time_ns()

    def add(self, path: str, parent: int, name: str, info: os.stat_result) -> None:
        entry: Entry | None
        try:
            if stat.S_ISDIR(info.st_mode):
                entry = Entry("d", stat.S_IMODE(info.st_mode))
            elif stat.S_ISLNK(info.st_mode):
                entry = Entry("l", stat.S_IMODE(info.st_mode), content=os.readlink(name, dir_fd=parent))
            elif stat.S_ISREG(info.st_mode):
                entry = self._file(path, os.open(name, _FILE, dir_fd=parent))
            else:
                entry = None
        except OSError:  # it cannot be read, or is something else by now
            entry = None
        if entry is None:
            self._made.skipped += 1
            return
        self._made.index[path] = entry
        self._path_bytes += len(path) + (len(entry.content) if entry.kind == "l" else 0)
        if len(self._made.index) > MAX_ENTRIES or self._path_bytes > MAX_PATH_BYTES:
            raise SandboxError(
                f"the workspace has more than {MAX_ENTRIES} entries, or paths of more than {MAX_PATH_BYTES} bytes",
                hint="Remove some, or put them into an archive",
            )

    def _file(self, path: str, fd: int) -> Entry | None:
        """The file's entry, its content in the archive unless it lies in an earlier one."""
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None
            self._made.size += info.st_size
            if self._made.size > self._limit:
                raise SandboxError(
                    f"the workspace has more than the {self._limit} bytes that a snapshot may hold",
                    hint="Raise SandboxLimits.snapshot_bytes, or keep large files elsewhere",
                )
            signature = (info.st_ino, info.st_ctime_ns, info.st_mtime_ns, info.st_size)
            if info.st_ctime_ns < self._began - RACY_NS:
                self._made.seen[path] = signature
            content, stream = self._known(path, file, signature) or self._packed(path, file, info.st_size)
            return Entry("f", stat.S_IMODE(info.st_mode), info.st_mtime_ns, info.st_size, content, stream)

    def _known(self, path: str, file: IO[bytes], signature: Signature) -> tuple[str, str] | None:
        """Hash and stream of a file that an earlier archive holds as it is now."""
        old = self._base.index.get(path)
        if old is None or old.kind != "f" or old.size != signature[-1]:
            return None
        same = self._base.seen.get(path) == signature or _hash_of(file) == old.content
        return (old.content, old.stream) if same else None

    def _packed(self, path: str, file: IO[bytes], size: int) -> tuple[str, str]:
        """A member of the tar file; a file that is cut short meanwhile is filled up, since its size comes first."""
        member, digest, left = tarfile.TarInfo(path), hashlib.sha256(), size
        member.size = size
        self._write(member.tobuf(tarfile.PAX_FORMAT))
        file.seek(0)
        while left:
            piece = file.read(min(_CHUNK, left)) or bytes(min(_CHUNK, left))
            digest.update(piece)
            self._write(piece)
            left -= len(piece)
        self._write(bytes(-size % tarfile.BLOCKSIZE))
        return digest.hexdigest(), self._stream

    def finish(self) -> None:
        self._write(bytes(2 * tarfile.BLOCKSIZE))

    def _write(self, data: bytes) -> None:
        self._made.packed += len(data)
        self._out.write(data)


def _walk(folder: int, made: Archive, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int, str, Any]]:
    """Everything below a folder in order: path, the open folder that it is in, name, stat."""
    for name in sorted(os.listdir(folder)):
        path = prefix + name
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:  # it went away meanwhile
            continue
        if len(os.fsencode(path)) > MAX_PATH or depth > MAX_DEPTH:
            made.skipped += 1
            continue
        yield path, folder, name, info
        if stat.S_ISDIR(info.st_mode):
            try:
                below = os.open(name, _FOLDER, dir_fd=folder)
            except OSError:
                made.skipped += 1  # what is in there cannot be read
                continue
            try:
                yield from _walk(below, made, f"{path}/", depth + 1)
            finally:
                os.close(below)


def _hash_of(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it asks for more than it uses


# -- to a folder


def unpack(
    index: Index, streams: Mapping[str, tuple[IO[bytes], int]], folder: int, owner: tuple[int, int] | None
) -> None:
    """Writes what the index says into an empty folder that nobody else uses yet.

    streams: each with its bytes before compression; owner: user and group of everything, None for this process's own.
    Raises SandboxError when an archive does not hold what its index says.
    """
    for path, entry in index.items():
        if entry.kind == "d":
            os.mkdir(path, 0o700, dir_fd=folder)
    for name, (file, size) in streams.items():
        wanted = {path: entry for path, entry in index.items() if entry.kind == "f" and entry.stream == name}
        try:
            _unpack_stream(file, size, wanted, folder, owner)
        except (tarfile.TarError, zstandard.ZstdError) as error:
            raise damaged(f"stream {name}: {error}") from error
        if wanted:
            raise damaged(f"stream {name} lacks {next(iter(wanted))!r}")
    if any(entry.kind == "f" and entry.stream not in streams for entry in index.values()):
        raise damaged("it names a stream that it does not have")
    for path, entry in index.items():
        if entry.kind == "l":
            os.symlink(entry.content, path, dir_fd=folder)
            if owner is not None:
                os.chown(path, *owner, dir_fd=folder, follow_symlinks=False)
    for path, entry in reversed(index.items()):
        if entry.kind == "d":
            _settle_folder(path, entry.mode, folder, owner)


def _settle_folder(path: str, mode: int, folder: int, owner: tuple[int, int] | None) -> None:
    fd = os.open(path, _FOLDER, dir_fd=folder)
    try:
        if owner is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, mode & KEPT_MODE)
    finally:
        os.close(fd)


def _unpack_stream(
    file: IO[bytes], size: int, wanted: dict[str, Entry], folder: int, owner: tuple[int, int] | None
) -> None:
    """Writes the wanted files and takes them off the list; the stream may hold others, which have changed since."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    with decompressor.stream_reader(file, closefd=False) as plain:
        bounded = _Bounded(plain, size)
        with tarfile.open(fileobj=cast(IO[bytes], bounded), mode="r|") as tar:
            for member in tar:
                entry = wanted.pop(member.name, None)
                if entry is None:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or member.size != entry.size:
                    raise damaged(f"{member.name!r} is not the file of its index")
                _write_file(member.name, entry, content, folder, owner)


def _write_file(path: str, entry: Entry, content: IO[bytes], folder: int, owner: tuple[int, int] | None) -> None:
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, _NEW, 0o600, dir_fd=folder), "wb") as file:
        while piece := content.read(_CHUNK):
            digest.update(piece)
            file.write(piece)
        file.flush()
        if digest.hexdigest() != entry.content:
            raise damaged(f"{path!r} does not have the content of its index")
        _settle_file(file.fileno(), entry.mode, entry.mtime_ns, owner)


def _settle_file(fd: int, mode: int, mtime_ns: int, owner: tuple[int, int] | None) -> None:
    if owner is not None:
        os.fchown(fd, *owner)
    os.fchmod(fd, mode & KEPT_MODE)
    os.utime(fd, ns=(mtime_ns, mtime_ns))


class _Bounded:
    """A stream that gives out no more bytes than were said to be in it."""

    def __init__(self, inner: Any, size: int) -> None:
        self._inner = inner
        self._left = size

    def read(self, size: int) -> bytes:
        data: bytes = self._inner.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise damaged("a stream holds more than was said")
        return data


# -- from folder to folder


def copy(source: int, target: int, owner: tuple[int, int] | None) -> None:
    """Copies everything into an empty folder; where the file system can, the copies share their blocks."""
    folders: list[tuple[str, int]] = []
    for path, parent, name, info in _walk(source, Archive()):
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(path, 0o700, dir_fd=target)
            folders.append((path, info.st_mode))
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=parent), path, dir_fd=target)
            if owner is not None:
                os.chown(path, *owner, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISREG(info.st_mode):
            _copy_file(path, parent, name, target, owner)
    for path, mode in reversed(folders):
        _settle_folder(path, mode, target, owner)


def _copy_file(path: str, parent: int, name: str, target: int, owner: tuple[int, int] | None) -> None:
    with (
        os.fdopen(os.open(name, _FILE, dir_fd=parent), "rb") as source,
        os.fdopen(os.open(path, _NEW, 0o600, dir_fd=target), "wb") as copied,
    ):
        info = os.fstat(source.fileno())
        try:
            fcntl.ioctl(copied.fileno(), _FICLONE, source.fileno())
        except OSError:
            shutil.copyfileobj(source, copied, _CHUNK)
            copied.flush()
        _settle_file(copied.fileno(), info.st_mode, info.st_mtime_ns, owner)
