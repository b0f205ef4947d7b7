"""Archives of a folder: what goes in comes out, only changes go in again, nothing hostile gets out of its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import socket
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom import SandboxError
from greenroom.sandbox import workspace
from greenroom.sandbox.workspace import Archive, Entry, Index, copy, decode_index, encode_index, pack, unpack

LIMIT = 1 << 30


class Folder:
    """A folder held open, and what is in it."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def facts(self) -> dict[str, Any]:
        """By path: kind, permission bits, and content, target or nothing; a file's time too."""
        found: dict[str, Any] = {}
        for where, names, files in os.walk(self.path):
            for name in names + files:
                path = Path(where, name)
                info = path.lstat()
                mode = stat.S_IMODE(info.st_mode)
                shown = os.path.relpath(path, self.path)
                if path.is_symlink():
                    found[shown] = ("l", os.readlink(path))
                elif path.is_dir():
                    found[shown] = ("d", mode)
                elif path.is_file():
                    found[shown] = ("f", mode, info.st_mtime_ns, path.read_bytes())
        return found


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "source")
    yield folder
    os.close(folder.fd)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "target")
    yield folder
    os.close(folder.fd)


def packed(folder: Folder, base: Archive | None = None, name: str = "one", limit: int = LIMIT) -> tuple[Archive, bytes]:
    out = io.BytesIO()
    return pack(folder.fd, base or Archive(), name, out, limit), out.getvalue()


def settle() -> None:
    """Until what was written is old enough that its times tell of every later change."""
    time.sleep(2 * workspace.RACY_NS / 10**9)


# -- round trips

NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
TREES = st.recursive(
    st.one_of(st.binary(max_size=3000), st.just(None), st.sampled_from(["a", "../up", "/etc/passwd", "loop"])),
    lambda inner: st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=15,
)


def plant(path: Path, tree: Any) -> None:
    for name, content in tree.items():
        below = path / name
        if isinstance(content, dict):
            below.mkdir()
            plant(below, content)
        elif isinstance(content, bytes):
            below.write_bytes(content)
        elif content is None:
            below.mkdir(mode=0o700)
        else:
            below.symlink_to(content)


@given(tree=st.dictionaries(NAMES, TREES, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_goes_in_comes_out(tmp_path: Path, tree: Any) -> None:
    where = Path(tempfile.mkdtemp(dir=tmp_path))
    source, target, copied = (Folder(where / name) for name in ("s", "t", "c"))
    plant(source.path, tree)
    archive, stream = packed(source)
    index = decode_index(encode_index(archive.index))
    assert index == archive.index
    unpack(index, {"one": (io.BytesIO(stream), archive.packed)}, target.fd, None)
    assert target.facts() == source.facts()
    copy(source.fd, copied.fd, None)
    assert copied.facts() == source.facts()
    for folder in (source, target, copied):
        os.close(folder.fd)


def test_modes_times_and_names_that_are_no_text(source: Folder, target: Folder) -> None:
    (source.path / "run").write_bytes(b"#!")
    (source.path / "run").chmod(0o755)
    (source.path / "secret").write_bytes(b"s")
    (source.path / "secret").chmod(0o600)
    os.utime(source.path / "secret", ns=(1, 1_234_567_890_123_456_789))
    (source.path / "old").write_bytes(b"from before 1970")
    os.utime(source.path / "old", ns=(-5, -315_619_200_000_000_001))
    Path(os.fsdecode(os.fsencode(source.path) + b"/\xff\xfe")).write_bytes(b"odd")
    (source.path / "a\nb").write_bytes(b"line")
    (source.path / ("n" * 200)).mkdir()
    (source.path / ("n" * 200) / ("m" * 200)).write_bytes(b"long")
    archive, stream = packed(source)
    unpack(decode_index(encode_index(archive.index)), {"one": (io.BytesIO(stream), archive.packed)}, target.fd, None)
    assert target.facts() == source.facts()


def test_a_program_gets_no_ones_rights_back(source: Folder, target: Folder) -> None:
    (source.path / "su").write_bytes(b"x")
    (source.path / "su").chmod(0o6755)
    archive, stream = packed(source)
    unpack(archive.index, {"one": (io.BytesIO(stream), archive.packed)}, target.fd, None)
    assert target.facts()["su"][1] == 0o755


def test_what_is_no_file_is_left_out_and_counted(source: Folder) -> None:
    os.mkfifo(source.path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(source.path / "socket"))
    (source.path / "file").write_bytes(b"x")
    archive, _ = packed(source)
    assert set(archive.index) == {"file"}
    assert archive.skipped == 2


def test_paths_too_deep_are_left_out_and_counted(source: Folder) -> None:
    where = os.dup(source.fd)
    for _ in range(300):
        os.mkdir("d", dir_fd=where)
        below = os.open("d", os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = below
    os.close(where)
    archive, _ = packed(source)
    assert archive.skipped == 1
    assert len(archive.index) == workspace.MAX_DEPTH + 1


# -- changes only


def test_only_changes_go_in_again(source: Folder, target: Folder) -> None:
    for number in range(20):
        (source.path / f"f{number}").write_bytes(b"%d" % number * 1000)
    settle()
    first, stream1 = packed(source)
    assert (first.packed > 20_000, len(first.seen)) == (True, 20)
    (source.path / "f3").write_bytes(b"new")
    (source.path / "f4").unlink()
    (source.path / "f5").rename(source.path / "moved")
    (source.path / "f6").chmod(0o600)
    second, stream2 = packed(source, first, "two")
    assert {path for path, entry in second.index.items() if entry.stream == "two"} == {"f3", "moved"}
    assert second.packed < 12_000
    streams = {"one": (io.BytesIO(stream1), first.packed), "two": (io.BytesIO(stream2), second.packed)}
    unpack(second.index, streams, target.fd, None)
    assert target.facts() == source.facts()


def test_a_change_that_hides_its_traces_goes_in_too(source: Folder) -> None:
    path = source.path / "f"
    path.write_bytes(b"one")
    settle()
    first, _ = packed(source)
    info = path.stat()
    path.write_bytes(b"two")  # the same size
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # and the same time
    assert packed(source, first, "two")[0].index["f"].stream == "two"


def test_a_file_that_changed_just_now_is_read_the_next_time_too(source: Folder) -> None:
    (source.path / "f").write_bytes(b"one")
    assert packed(source)[0].seen == {}


def test_what_is_known_only_by_its_hash_is_read_but_not_packed(source: Folder) -> None:
    (source.path / "f").write_bytes(b"x" * 10_000)
    first, _ = packed(source)
    second, stream = packed(source, Archive(index=first.index), "two")
    assert second.index == first.index
    assert len(stream) < 200


def test_a_file_that_is_cut_short_while_it_is_read_keeps_the_archive_whole(
    source: Folder, target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.path / "a").write_bytes(b"a" * 50_000)
    (source.path / "b").write_bytes(b"b")
    real = workspace._Packing._write

    def write(self: Any, data: bytes) -> None:
        real(self, data)
        os.truncate(source.path / "a", 10)

    monkeypatch.setattr(workspace._Packing, "_write", write)
    archive, stream = packed(source)
    unpack(archive.index, {"one": (io.BytesIO(stream), archive.packed)}, target.fd, None)
    assert target.facts()["b"][3] == b"b"
    assert len(target.facts()["a"][3]) == 50_000


# -- bounds


def test_too_many_bytes_or_entries_are_refused(source: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.path / "a").write_bytes(b"x" * 1000)
    with pytest.raises(SandboxError, match="more than the 999 bytes"):
        packed(source, limit=999)
    (source.path / "a").unlink()
    monkeypatch.setattr(workspace, "MAX_ENTRIES", 1)
    (source.path / "b").touch()
    (source.path / "c").touch()
    with pytest.raises(SandboxError, match="more than 1 entries"):
        packed(source)


def test_paths_of_too_many_bytes_are_refused(source: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_PATH_BYTES", 500)
    for number in range(6):
        (source.path / f"{number}{'n' * 99}").touch()
    with pytest.raises(SandboxError, match="paths of more than 500 bytes"):
        packed(source)


def test_an_index_that_is_too_long_is_never_cut(source: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (source.path / f"f{number}").touch()
    body = encode_index(packed(source)[0].index)
    for bound in (100, 1000, 4000):
        monkeypatch.setattr(workspace, "MAX_INDEX_BYTES", bound)
        with pytest.raises(SandboxError, match="damaged"):
            decode_index(body)


def test_a_file_with_a_hole_of_a_terabyte_is_refused_before_it_is_read(source: Folder) -> None:
    (source.path / "sparse").touch()
    os.truncate(source.path / "sparse", 1 << 40)
    began = time.process_time()
    with pytest.raises(SandboxError, match="bytes that a snapshot may hold"):
        packed(source)
    assert time.process_time() - began < 2


# -- hostile archives

F = Entry("f", 0o644, 0, 1, hashlib.sha256(b"x").hexdigest(), "one")


@pytest.mark.parametrize(
    "index",
    [
        {"../up": F},
        {"/etc/x": F},
        {"a/../../x": F},
        {"a//b": F},
        {"": F},
        {".": F},
        {"a\0b": F},
        {"no/folder": F},
        {"l": Entry("l", 0o777, content="/etc"), "l/passwd": F},
        {"f": F, "f/below": F},
        {"dev": Entry("c", 0o666)},
        {"f": dataclasses.replace(F, size=-1)},
        {"l": Entry("l", 0o777, content="")},
        {"x" * 5000: F},
    ],
    ids=lambda index: next(reversed(index))[:12],
)
def test_an_index_that_leaves_its_folder_is_refused(index: Index) -> None:
    with pytest.raises(SandboxError, match="damaged"):
        decode_index(encode_index(index))


@pytest.mark.parametrize("body", [b"no zstd", zstandard.compress(b"[1]"), zstandard.compress(b'["a"')])
def test_an_index_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(SandboxError, match="damaged"):
        decode_index(body)


def stream_of(*members: tuple[tarfile.TarInfo, bytes]) -> tuple[io.BytesIO, int]:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return io.BytesIO(zstandard.compress(plain.getvalue())), len(plain.getvalue())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    ("members", "index", "message"),
    [
        ([(member("../up"), b"x")], {}, None),  # nothing asks for it
        ([(member("/tmp/abs"), b"x")], {}, None),
        ([(member("f"), b"xx")], {"f": F}, "not the file of its index"),
        ([(member("f"), b"y")], {"f": F}, "not have the content"),
        ([(member("f", tarfile.SYMTYPE, "/etc/passwd"), b"")], {"f": F}, "not the file of its index"),
        ([(member("f", tarfile.LNKTYPE, "/etc/passwd"), b"")], {"f": F}, "not the file of its index"),
        ([(member("f", tarfile.CHRTYPE), b"")], {"f": F}, "not the file of its index"),
        ([(member("f", tarfile.FIFOTYPE), b"")], {"f": F}, "not the file of its index"),
        ([(member("f"), b"x"), (member("f"), b"z")], {"f": F}, None),  # the first one counts
        ([], {"f": F}, "lacks 'f'"),
        ([(member("f"), b"x")], {"f": dataclasses.replace(F, stream="two")}, "a stream that it does not have"),
    ],
)
def test_a_stream_that_does_not_hold_what_its_index_says(
    target: Folder, members: list[Any], index: Index, message: str | None
) -> None:
    streams = {"one": stream_of(*members)}
    if message is None:
        unpack(index, streams, target.fd, None)
        assert set(target.facts()) == set(index)
    else:
        with pytest.raises(SandboxError, match=message):
            unpack(index, streams, target.fd, None)
    assert not Path("/tmp/abs").exists()
    assert not (target.path.parent / "up").exists()


def test_a_bomb_goes_off_at_the_size_that_was_said(target: Folder) -> None:
    bomb, _ = stream_of((member("f"), bytes(200_000_000)))
    index = {"f": dataclasses.replace(F, size=200_000_000)}
    with pytest.raises(SandboxError, match="more than was said"):
        unpack(index, {"one": (bomb, 20_000)}, target.fd, None)
    assert (target.path / "f").stat().st_size < 1_000_000


def test_a_link_that_is_there_first_is_not_followed(target: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"safe")
    (target.path / "f").symlink_to(outside)
    with pytest.raises(OSError, match="exists"):
        unpack({"f": F}, {"one": stream_of((member("f"), b"x"))}, target.fd, None)
    assert outside.read_bytes() == b"safe"


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_a_stream_that_is_cut_off(source: Folder, target: Folder, cut: int) -> None:
    (source.path / "f").write_bytes(os.urandom(5000))
    archive, stream = packed(source)
    with pytest.raises(SandboxError, match="damaged"):
        unpack(archive.index, {"one": (io.BytesIO(stream[:cut]), archive.packed)}, target.fd, None)
