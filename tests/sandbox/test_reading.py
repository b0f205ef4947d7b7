"""Tools that read files of this machine: below one folder, or under a name that says it all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom import ConfigError, lookup_builtin_tool, rooted_read_tool
from greenroom.sandbox.unrestricted import unrestricted_read_tool


async def test_a_rooted_tool_reads_below_its_folder_and_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    (root / "a").mkdir(parents=True)
    (root / "a" / "f").write_text("grüße")
    (root / "bin").write_bytes(b"\xff")
    (tmp_path / "secret").write_text("secret")
    os.symlink("../secret", root / "out")
    os.symlink("a/f", root / "in")
    os.mkfifo(root / "pipe")
    tool = rooted_read_tool(root)
    assert (tool.spec.name, tool.spec.effect) == ("read_file", "read_only")
    for path in ("a/f", "in", "a/../in", str(root / "a" / "f")):
        assert (await tool.call({"path": path})).text == "grüße"
    for path in ("out", "../secret", "/etc/passwd", "a/../../secret", "pipe", "bin", "none", "a", "", "a\0f"):
        refused = await tool.call({"path": path})
        assert refused.is_error, path
        assert "secret" not in refused.text.replace(repr("../secret"), "").replace(repr("a/../../secret"), "")
    root.rename(tmp_path / "moved")
    assert (await tool.call({"path": "a/f"})).text == "grüße", "the folder is held open"
    with pytest.raises(ConfigError, match="no folder"):
        rooted_read_tool(tmp_path / "none")


async def test_a_long_file_comes_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("ä" * 70_000)
    tool = rooted_read_tool(tmp_path)
    first = await tool.call({"path": "long"})
    assert first.text.endswith("\n[4464 more characters: offset 65536]")
    assert (await tool.call({"path": "long", "offset": 65536})).text == "ä" * 4464


async def test_the_unrestricted_one_is_only_found_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    tool = unrestricted_read_tool()
    assert tool.spec.name == "read_any_file"
    assert (await tool.call({"path": str(tmp_path / "f")})).text == "x"
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), str(tmp_path / "none"), "/dev/zero", "a\0"):
        assert (await tool.call({"path": path})).is_error
    assert lookup_builtin_tool("read_any_file") is None
