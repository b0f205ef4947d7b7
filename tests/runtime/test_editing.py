"""Editing files in place: the field cases, line ends, encodings, and that nothing beside the place is touched."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import CASES, call, calls, results, scripted

from greenroom import AgentRuntime
from greenroom.runtime.editing import MAX_PLACES, Edit, apply_edit
from greenroom.runtime.errors import EditRefused
from greenroom.runtime.tools.builtin import WriteFileArguments
from greenroom.testing import FakeSandboxes

MATCHING: list[dict[str, str]] = json.loads((CASES / "C29_replace_matching.json").read_text())["rows"]
ENCODINGS: dict[str, dict[str, Any]] = json.loads((CASES / "C28_encodings.expected.json").read_text())


@pytest.mark.parametrize("row", [row for row in MATCHING if "old" in row], ids=lambda row: row["want"][:30])
def test_the_place_that_is_meant_or_none(row: dict[str, str]) -> None:
    data, edit = row["file"].encode(), Edit("replace", row["new"], row["old"])
    if not row["want"].startswith("error"):
        wanted = row["want"].partition(" (exact")[0]
        assert apply_edit(data, edit).data.decode() == wanted
        return
    with pytest.raises(EditRefused) as refused:
        apply_edit(data, edit)
    told = str(refused.value)
    if "line numbers 1 and 3" in row["want"]:
        assert "twice (line 1, 3)" in told
    if "overlapping" in row["want"]:
        assert "overlapping, in lines 1, 2" in told
    if "empty" in row["want"]:
        assert "empty" in told


@pytest.mark.parametrize("name", ENCODINGS)
def test_bytes_outside_the_place_stay_as_they_are(name: str) -> None:
    old, new = ENCODINGS[name]["replace"]
    data = (CASES / f"C28_{name}.txt").read_bytes()
    want = ENCODINGS[name].get("want_hex") or ENCODINGS[name]["want"].rpartition(" ")[2]
    assert apply_edit(data, Edit("replace", new, old)).data.hex() == want


def test_text_that_another_encoding_cannot_hold_is_refused() -> None:
    with pytest.raises(EditRefused, match="not UTF-8"):
        apply_edit(b"caf\xe9 = 1", Edit("replace", "thé", "1"))
    with pytest.raises(EditRefused, match="not UTF-8"):
        apply_edit(b"caf\xe9", Edit("append", "é"))


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("a\nb\n", Edit("insert_after", "x", "a"), "a\nx\nb\n"),
        ("a\nb\n", Edit("insert_after", "x\n", "a"), "a\nx\nb\n"),
        ("a\nb\n", Edit("insert_after", "x", "a\n"), "a\nx\nb\n"),
        ("a\nb\n", Edit("insert_after", "x", "b"), "a\nb\nx\n"),
        ("a\nb", Edit("insert_after", "x", "b"), "a\nb\nx"),
        ("a\nb", Edit("insert_after", "x\n", "b"), "a\nb\nx"),
        ("a\nb\n", Edit("insert_before", "x", "b"), "a\nx\nb\n"),
        ("a\nb\n", Edit("insert_before", "x", "a"), "x\na\nb\n"),
        ("\ufeffa\r\nb\r\n", Edit("insert_before", "x\ny", "a"), "\ufeffx\r\ny\r\na\r\nb\r\n"),
        ("one two\nthree\n", Edit("insert_after", "x", "one"), "one two\nx\nthree\n"),
        ("a\na\n", Edit("insert_after", "x", "a", None), "a\nx\na\nx\n"),
        ("a\na\n", Edit("replace", "x", "a", 2), "x\nx\n"),
        ("a\r\nb\r\n", Edit("replace", "x\r\ny", "a\nb"), "x\r\ny\r\n"),
        ("a\r\nb\r\n", Edit("replace", "", "a\n"), "b\r\n"),
        ("a\r\nb\nc\nd\n", Edit("replace", "x\ny", "d"), "a\r\nb\nc\nx\ny\n"),
        ("", Edit("append", "x\n"), "x\n"),
        ("a\n", Edit("append", "x"), "a\nx"),
        ("a\r\nb", Edit("append", "x\ny"), "a\r\nb\r\nx\r\ny"),
        ("tabs\there", Edit("replace", "\\1 $& \\g<0>", "\t"), "tabs\\1 $& \\g<0>here"),
    ],
)
def test_every_mode_keeps_the_files_own_line_ends(before: str, edit: Edit, after: str) -> None:
    assert apply_edit(before.encode(), edit).data.decode() == after


def test_an_append_to_an_open_line_says_what_it_did() -> None:
    assert "no end" in apply_edit(b"open", Edit("append", "x")).note
    assert apply_edit(b"closed\n", Edit("append", "x")).note == ""


@pytest.mark.parametrize(
    ("count", "said"), [(1, "3 times (line 1, 2, 3), not once"), (2, "not twice"), (4, "not 4 times")]
)
def test_a_wrong_number_of_places_is_told_with_their_lines(count: int, said: str) -> None:
    with pytest.raises(EditRefused) as refused:
        apply_edit(b"x\nx\nx\n", Edit("replace", "y", "x", count))
    assert said in str(refused.value)


def test_what_is_not_there_is_not_guessed() -> None:
    for old in ("Debug", "debug  = 1", "debug = 1 ", "ebug = 2"):
        with pytest.raises(EditRefused, match="exactly"):
            apply_edit(b"debug = 1\n", Edit("replace", "y", old))


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "bb", "", "é"]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["\n", "\r\n"]), min_size=6, max_size=6),
    st.sampled_from(["x", "x\ny", ""]),
)
def test_only_the_place_changes_whatever_the_line_ends(lines: list[str], ends: list[str], text: str) -> None:
    parts = [f"{line}{end}" for line, end in zip(lines, ends, strict=False)]
    before, mark, after = "".join(parts[:2]), "<<\nmark>>", "".join(parts[2:])
    data = f"{before}{mark}{after}".encode()
    changed = apply_edit(data, Edit("replace", text, mark)).data.decode()
    assert changed.startswith(before)
    assert changed.endswith(after)
    middle = changed[len(before) : len(changed) - len(after)]
    assert middle.replace("\r\n", "\n") == text


def test_what_would_change_a_file_beyond_all_measure_is_refused() -> None:
    many = b"x\n" * (MAX_PLACES + 1)
    for edit in (Edit("replace", "y", "x", None), Edit("insert_after", "y", "x", None), Edit("replace", "y", "x")):
        with pytest.raises(EditRefused, match="more than"):
            apply_edit(many, edit)
    assert apply_edit(many[2:], Edit("insert_after", "y", "x", None)).places == MAX_PLACES


# -- the tool


async def written(sandboxes: FakeSandboxes, *edits: dict[str, Any]) -> tuple[list[Any], bytes]:
    batch = calls(*(call("write_file", path="f", **edit) for edit in edits))
    async with AgentRuntime("memory:", sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(scripted(batch, "ok"), "s")
        await session.run("go")
        return results(await session.transcript()), sandboxes.opened["s"].files["f"]


async def test_a_model_writes_changes_and_appends(home: Any) -> None:
    answers, content = await written(
        FakeSandboxes(),
        {"content": "one\ntwo\n"},
        {"mode": "replace", "old_string": "two", "new_string": "2"},
        {"mode": "replace", "old_string": "one", "content": "1"},
        {"mode": "insert_after", "old_string": "1", "content": "1.5"},
        {"mode": "append", "content": "3\n"},
        {"mode": "replace", "old_string": "\n", "new_string": ";", "replace_all": True},
        {"mode": "replace", "old_string": ";", "new_string": "\n", "expected_replacements": 4},
        {"mode": "replace", "old_string": "2", "new_string": ""},
    )
    assert content == b"1\n1.5\n\n3\n"
    assert [answer.is_error for answer in answers] == [False] * 8
    assert answers[5].text == "changed f in 4 places"
    assert answers[7].text == "changed f in 1 place"


async def test_a_refused_edit_is_an_error_and_the_file_is_as_it_was(home: Any) -> None:
    answers, content = await written(
        FakeSandboxes(),
        {"content": "a\na\n"},
        {"mode": "replace", "old_string": "a", "new_string": "b"},
        {"mode": "replace", "old_string": "a", "new_string": "b", "expected_replacements": 3},
        {"mode": "insert_before", "old_string": "zzz", "content": "b"},
        {"mode": "replace", "old_string": "", "new_string": "b"},
        {"mode": "insert_after", "content": "b"},
        {"mode": "append"},
        {"mode": "sideways", "content": "b"},
        {"content": "b", "old_string": "a"},
        {"mode": "replace", "old_string": "a", "content": "b", "replace_all": True, "expected_replacements": 2},
    )
    assert content == b"a\na\n"
    assert [answer.is_error for answer in answers] == [False] + [True] * 9
    assert "twice" in answers[1].text
    assert "needs old_string" in answers[4].text


async def test_a_file_that_is_not_there_can_only_be_written_or_appended_to(home: Any) -> None:
    answers, content = await written(
        FakeSandboxes(), {"mode": "replace", "old_string": "a", "content": "b"}, {"mode": "append", "content": "new"}
    )
    assert [answer.is_error for answer in answers] == [True, False]
    assert content == b"new"


def test_the_modes_of_the_tool_are_those_of_an_edit_and_write() -> None:
    modes = get_args(WriteFileArguments.model_fields["mode"].annotation)
    assert set(modes) == {"write", "replace", "insert_after", "insert_before", "append"}
