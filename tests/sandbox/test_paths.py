"""Paths that try to leave the workspace: every row is refused without touching its target."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from scenes import CASES

from greenroom import PathRefused
from greenroom.sandbox import beneath
from greenroom.sandbox.output import OutputBuffer
from greenroom.sandbox.paths import RootedFiles

TRIES = 50_000 if os.environ.get("GREENROOM_LONG") else 4_000
"""Reads and writes that race with a swapped link."""

CASE: dict[str, Any] = json.loads((CASES / "C30_path_escape.json").read_text())


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How paths are opened: by the kernel, or where it cannot."""
    if request.param == "walk":
        monkeypatch.setattr(beneath, "kernel_can", lambda: False)
    return str(request.param)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """The case's tree below a folder that stands for /w."""
    for folder in ("ws", "out", "ws-evil"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out" / "secret.txt").write_text("secret")
    (tmp_path / "ws-evil" / "x").write_text("evil")
    ws = tmp_path / "ws"
    (ws / "real.txt").write_text("real")
    os.symlink("/", ws / "up")
    os.symlink(tmp_path / "out" / "secret.txt", ws / "doc.txt")
    os.symlink(tmp_path / "out" / "new.txt", ws / "dangling")
    os.symlink("real.txt", ws / "inside")
    os.symlink("loop", ws / "loop")
    return tmp_path


@pytest.mark.parametrize("via_link", [False, True], ids=["root", "root is a link"])
@pytest.mark.parametrize("row", CASE["rows"], ids=lambda row: f"{row[0]} {row[1]!r}")
def test_every_row_is_refused_or_allowed_as_it_says(world: Path, row: list[str], via_link: bool) -> None:
    verb, path, want = row
    root = world / "ws"
    if via_link:
        os.symlink(root, world / "link")
        root = world / "link"
    files = RootedFiles(root)
    path = path.replace("/w/", f"{world}/")
    before = sorted(str(found) for found in (world / "out").rglob("*"))
    try:
        if verb == "read":
            files.read(path, 1 << 20)
        else:
            files.write(path, b"new")
        allowed = True
    except (PathRefused, FileNotFoundError, NotADirectoryError):
        allowed = False
    finally:
        files.close()
    assert allowed == want.startswith("allow")
    assert sorted(str(found) for found in (world / "out").rglob("*")) == before
    assert (world / "out" / "secret.txt").read_text() == "secret"


def test_links_inside_and_absolute_paths_inside_are_fine(world: Path) -> None:
    files = RootedFiles(world / "ws")
    assert files.read("inside", 100) == b"real"
    assert files.read(str(world / "ws" / "real.txt"), 100) == b"real"
    files.write("inside", b"changed")
    assert (world / "ws" / "real.txt").read_text() == "changed"
    assert (world / "ws" / "inside").is_symlink()
    files.close()


def test_a_write_keeps_the_mode_and_shows_nobody_half_of_it(world: Path) -> None:
    script = world / "ws" / "run.sh"
    script.write_text("old")
    script.chmod(0o750)
    files = RootedFiles(world / "ws")
    files.write("run.sh", b"new")
    assert script.read_text() == "new"
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert [path.name for path in (world / "ws").glob(".run*")] == []
    files.close()


def test_only_regular_files_are_read_and_none_that_is_too_large(world: Path) -> None:
    os.mkfifo(world / "ws" / "pipe")
    (world / "ws" / "big").write_bytes(b"x" * 2000)
    files = RootedFiles(world / "ws")
    with pytest.raises(PathRefused, match="regular"):
        files.read("pipe", 100)
    with pytest.raises(PathRefused, match="regular"):
        files.write("pipe", b"x")
    with pytest.raises(IsADirectoryError):
        files.read(".", 100)
    with pytest.raises(OSError, match="2000 bytes"):
        files.read("big", 1000)
    files.close()


def test_a_link_swapped_during_the_call_never_leads_out(world: Path) -> None:
    files = RootedFiles(world / "ws")
    target, secret = world / "ws" / "swap", world / "out" / "secret.txt"
    stop = threading.Event()

    def swap() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            fresh = world / "ws" / f"fresh{number % 2}"
            if number % 2:
                fresh.write_text("harmless")
            else:
                os.symlink(secret, fresh)
            os.replace(fresh, target)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = set()
        for _ in range(TRIES // 2):
            try:
                seen.add(files.read("swap", 100))
            except (PathRefused, FileNotFoundError):
                pass
            try:
                files.write("swap", b"written")
            except (PathRefused, FileNotFoundError):
                pass
    finally:
        stop.set()
        swapper.join()
        files.close()
    assert b"secret" not in seen
    assert secret.read_text() == "secret"


def test_a_buffer_keeps_head_and_tail_whatever_the_pieces() -> None:
    data = bytes(range(256)) * 40
    for size in (1, 7, 1000, len(data)):
        buffer = OutputBuffer(100, 50)
        for start in range(0, len(data), size):
            buffer.add(data[start : start + size])
        assert buffer.total == len(data)
        assert buffer.dropped == len(data) - 150
    short = OutputBuffer(4, 4)
    short.add("aé".encode())
    short.add(b"bcde")
    assert (short.dropped, short.text()) == (0, "aébcde")
    cut = OutputBuffer(2, 3)
    cut.add("aéééb".encode())
    assert cut.text() == "a\n[... 3 bytes dropped ...]\néb"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_a_filter_without_openat2_is_found_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.undo()
    beneath.kernel_can.cache_clear()
    assert beneath.kernel_can()
    monkeypatch.setattr(beneath, "_openat2", refuse)
    beneath.kernel_can.cache_clear()
    assert not beneath.kernel_can()
    beneath.kernel_can.cache_clear()


def test_links_one_after_the_other_and_up_and_down_again(world: Path) -> None:
    ws = world / "ws"
    (ws / "a" / "b").mkdir(parents=True)
    (ws / "a" / "b" / "f").write_text("found")
    os.symlink("a/b", ws / "one")
    os.symlink("one/../b/./f", ws / "two")
    os.symlink("../one/f", ws / "a" / "three")
    os.symlink("../../ws/real.txt", ws / "a" / "out-and-in")
    os.symlink("new", ws / "a" / "to-be-made")
    before = len(os.listdir("/proc/self/fd"))
    files = RootedFiles(ws)
    for path in ("one/f", "two", "a/three", "a/../a/b/f", "one//f"):
        assert files.read(path, 100) == b"found", path
    with pytest.raises(PathRefused):
        files.read("a/out-and-in", 100)
    with pytest.raises(NotADirectoryError):
        files.read("real.txt/f", 100)
    files.write("a/to-be-made", b"made")
    assert (ws / "a" / "new").read_text() == "made"
    for number in range(50):
        os.symlink(f"l{number + 1}", ws / f"l{number}")
    with pytest.raises(PathRefused):
        files.read("l0", 100)
    assert files.list("one") == ("f",)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_both_ways_answer_alike_whatever_the_path(world: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random paths of what is there, and of what leads out."""
    ws = world / "ws"
    (ws / "d" / "e").mkdir(parents=True)
    (ws / "d" / "f").write_text("f")
    os.symlink("..", ws / "d" / "up")
    os.symlink("d", ws / "ld")
    names = ["d", "e", "f", "up", "ld", "..", ".", "", "inside", "loop", "doc.txt", "none", "dangling"]
    root = os.open(ws, os.O_RDONLY)
    chance = random.Random(20261201)

    def answer(path: str, flags: int) -> tuple[int, int] | int | None:
        try:
            fd = beneath.open_beneath(root, path, flags)
        except OSError as error:
            return error.errno
        info = os.fstat(fd)
        os.close(fd)
        return info.st_dev, info.st_ino

    for _ in range(3000):
        path = "/".join(chance.choice(names) for _ in range(chance.randint(1, 6))).lstrip("/") or "."
        flags = chance.choice([os.O_RDONLY | os.O_NONBLOCK, os.O_RDONLY | os.O_DIRECTORY, os.O_PATH | os.O_DIRECTORY])
        both = []
        for can in (True, False):
            monkeypatch.setattr(beneath, "kernel_can", lambda can=can: can)
            both.append(answer(path, flags))
        assert both[0] == both[1], (path, flags)
    os.close(root)
