"""Saving a workspace folder to the object store and bringing it back: workspace.py's archives as a snapshot's parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from greenroom.runtime.errors import SandboxError
from greenroom.runtime.storage.snapshots import PART_BYTES, Part, Saved, Snapshot, SnapshotStore, Stream
from greenroom.runtime.workspace import RESTORING
from greenroom.sandbox.workspace import Archive, copy, decode_index, encode_index, pack, unpack

T = TypeVar("T")

MAX_STREAMS = 16
"""Snapshots that one may be made of; the next one holds everything again."""

SLACK = 1 << 20
"""Bytes of contents that no file has any more, beyond as many as the files have, before everything is packed again."""


@dataclass(slots=True)
class Packed:
    """What a snapshot is to hold, read already: the folder may change while it is stored. `close` lets go of it."""

    name: str
    archive: Archive
    base: Snapshot | None
    file: IO[bytes]

    async def put(self, store: SnapshotStore) -> Snapshot:
        """Stores the parts, then the manifest."""
        archive, index, used = self.archive, encode_index(self.archive.index), _used(self.archive)
        streams = [stream for stream in _streams(self.base) if stream.name in used]
        if self.name in used:
            self.file.seek(0)
            parts = await self._put_parts(store, "data", self.file)
            streams.append(Stream(name=self.name, size=archive.packed, parts=parts))
        with tempfile.SpooledTemporaryFile(max_size=PART_BYTES) as file:
            file.write(index)
            file.seek(0)
            listed = await self._put_parts(store, "index", file)
        made = Snapshot(
            name=self.name,
            parent=None if self.base is None else self.base.name,
            made=time.time(),
            index=Stream(name="index", size=len(index), parts=listed),
            streams=tuple(streams),
            files=sum(entry.kind == "f" for entry in archive.index.values()),
            size=archive.size,
            skipped=archive.skipped,
        )
        await store.put(made)
        return made

    async def _put_parts(self, store: SnapshotStore, kind: str, file: IO[bytes]) -> tuple[Part, ...]:
        parts: list[Part] = []
        while piece := await asyncio.to_thread(file.read, PART_BYTES):
            parts.append(await store.put_part(f"{self.name}.{kind}.{len(parts)}", piece))
        return tuple(parts)

    def close(self) -> None:
        self.file.close()


def pack_folder(folder: int, known: Archive, base: Snapshot | None, name: str, limit: int, near: Path) -> Packed | None:
    """What is to be saved of the folder; None when nothing has changed since `base`, of which `known` is the archive.

    near: a folder on a file system with room, for what is packed until it is stored.
    """
    file = tempfile.TemporaryFile(dir=near)  # noqa: SIM115  # Packed closes it
    try:
        archive = pack(folder, known, name, file, limit)
        if base is not None and archive.index == known.index:
            known.seen = archive.seen
            file.close()
            return None
        used = _used(archive)
        kept = [stream for stream in _streams(base) if stream.name in used]
        held = sum(stream.size for stream in kept)
        if len(kept) >= MAX_STREAMS or held > 2 * archive.size + SLACK:
            file.seek(0)
            file.truncate()
            archive = pack(folder, Archive(), name, file, limit)
        return Packed(name, archive, base, file)
    except BaseException:
        file.close()
        raise


async def restore(saved: Saved, workspace: Path, owner: tuple[int, int] | None, limit: int) -> None:
    """Puts the snapshot in the workspace's place, whole or not at all.

    Raises StorageError or SandboxError when a part is missing or damaged, or it has more than `limit` bytes.
    """
    store, snapshot = saved.store, saved.snapshot
    archive = await load(saved)
    if archive.size > limit:
        raise SandboxError(
            f"the snapshot {snapshot.name} has {archive.size} bytes, more than {limit}",
            hint="Raise SandboxLimits.snapshot_bytes",
        )
    workspace = workspace.resolve()
    near = roomy(workspace)
    staged = near / f".{workspace.name}.restoring-{secrets.token_hex(4)}"
    try:
        await to_its_end(_make_room, near, workspace, staged)
        with ExitStack() as stack:
            streams: dict[str, tuple[IO[bytes], int]] = {}
            for stream in snapshot.streams:
                file = stack.enter_context(tempfile.TemporaryFile(dir=near))
                await _fetch(store.read(stream), file)
                streams[stream.name] = (file, stream.size)
            fd = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            await to_its_end(unpack, archive.index, streams, fd, owner)
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, 0o755)
        await to_its_end(_take_place, staged, workspace, owner)
    finally:
        await to_its_end(partial(shutil.rmtree, staged, ignore_errors=True))


async def load(saved: Saved) -> Archive:
    """What a snapshot says of its workspace; nothing is known of how the files look here."""
    index = decode_index(b"".join([piece async for piece in saved.store.read(saved.snapshot.index)]))
    return Archive(index=index, size=sum(entry.size for entry in index.values()))


async def to_its_end(work: Callable[..., T], *args: Any) -> T:
    """Runs it in a thread; who is cancelled waits for its end first: it works on descriptors that are closed after."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # looked at
        raise cancelled
    return running.result()


async def _fetch(pieces: AsyncIterable[bytes], file: IO[bytes]) -> None:
    async for piece in pieces:
        await asyncio.to_thread(file.write, piece)
    file.seek(0)


def roomy(workspace: Path) -> Path:
    """A folder for what is packed or unpacked on the way: beside the workspace if that works: so it can move in."""
    beside = workspace.parent
    with contextlib.suppress(OSError):
        beside.mkdir(parents=True, exist_ok=True)
    return beside if os.access(beside, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _make_room(near: Path, workspace: Path, staged: Path) -> None:
    """Makes the folder to restore into; what a restore that never ended has left is removed."""
    for left in near.iterdir():
        if left.name.startswith(f".{workspace.name}.restoring-"):
            shutil.rmtree(left, ignore_errors=True)
    staged.mkdir(mode=0o700)


def _take_place(staged: Path, workspace: Path, owner: tuple[int, int] | None) -> None:
    """Puts the restored folder in the workspace's place; a mount point cannot be replaced, and is filled instead."""
    old = staged.with_name(f"{staged.name}-old")
    try:
        if workspace.is_dir():
            workspace.rename(old)
        staged.rename(workspace)
    except OSError:
        if old.is_dir() and not workspace.exists():
            old.rename(workspace)
        _fill(staged, workspace, owner)
    shutil.rmtree(old, ignore_errors=True)


def _fill(staged: Path, workspace: Path, owner: tuple[int, int] | None) -> None:
    """A mark stands in the folder until all of it is there: half of it is never taken for the whole."""
    mark = workspace / RESTORING
    mark.touch()
    for left in workspace.iterdir():
        if left != mark:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    source, target = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (staged, workspace))
    try:
        copy(source, target, owner)
    finally:
        os.close(source)
        os.close(target)
    mark.unlink()


def _streams(snapshot: Snapshot | None) -> tuple[Stream, ...]:
    return () if snapshot is None else snapshot.streams


def _used(archive: Archive) -> set[str]:
    return {entry.stream for entry in archive.index.values() if entry.kind == "f"}
