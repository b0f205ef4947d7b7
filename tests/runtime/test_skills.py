"""Skills: found, read leniently, told of when they are bad, path-safe, and shipped with their agent."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from scenes import CASES, call, calls, results, scripted, tools

from greenroom import AgentConfig, AgentRuntime, ConfigError, Scripted, Storage
from greenroom.runtime.agents import pack, unpack
from greenroom.runtime.skills import MAX_SKILLS_BYTES, SkillError, SkillManager
from greenroom.runtime.storage import MemoryObjectStore


def skill(root: Path, id: str, text: str | bytes, **resources: str | bytes) -> Path:
    folder = root / id
    folder.mkdir(parents=True)
    for name, content in {"SKILL.md": text, **resources}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


GOOD = "---\nname: PDF tools\ndescription: Splits and joins\n---\nUse the MARKER.\n"


def test_the_cases(tmp_path: Path) -> None:
    for file in sorted(CASES.glob("C48*.md")):
        skill(tmp_path, file.name[3], file.read_bytes())
    skill(tmp_path, "e", "---\nname: open\ndescription: never closed\n")
    skill(tmp_path, "f", "---\nname: 123\ndescription: [a]\n---\n")
    skill(tmp_path, "g", "---\nname: !!python/object/apply:os.system ['touch pwned.txt']\ndescription: x\n---\n")
    found = SkillManager.discover_dirs([tmp_path])
    by_id = {one.id: one for one in found.list()}
    assert set(by_id) == {"a", "b", "c"}
    assert by_id["a"].name == "tidy-notes"
    assert by_id["a"].description == 'Use for meeting notes: tidy, group and date them. Triggers on: "/tidy"'
    assert by_id["a"].body == "Body text."
    assert (by_id["b"].name, by_id["b"].body) == ("crlf-skill", "Body --- with dashes\n---\nmore body")
    assert by_id["c"].description == "first line second: line"
    assert {(one.id, one.line) for one in found.broken} == {("d", 1), ("e", 1), ("f", 2), ("g", 2)}
    assert not Path("pwned.txt").exists()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (b"\xff\xfe", 1, "not UTF-8"),
        ("", 1, "front matter"),
        ("\n---\nname: a\n---\n", 1, "front matter"),
        ("---\nname: a\n---\n", 2, "description is missing"),
        ("---\ndescription: a\nname:\n---\n", 3, "name is missing"),
        ("---\nname: a\ndescription: {x: 1}\n---\n", 3, "description is missing or no text"),
        ("---\n- a\n---\n", 2, "name is missing"),
        ("---\nname: a\ndescription: 'open\n---\n", 3, "unexpected end"),
        ("---\n---\n", 2, "name is missing"),
        ("---\nname: a\n\tx: 1\n---\n", 3, "found character"),
    ],
)
def test_a_bad_skill_is_told_of_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | bytes, line: int, problem: str
) -> None:
    skill(tmp_path, "bad", text)
    skill(tmp_path, "good", GOOD)
    with caplog.at_level(logging.WARNING, "greenroom.skills"):
        found = SkillManager.discover_dirs([tmp_path])
    assert [one.id for one in found.list()] == ["good"]
    (broken,) = found.broken
    assert broken.line == line
    assert problem in broken.problem
    assert f"bad/SKILL.md:{line} is no skill" in caplog.text


def test_folders_are_looked_at_one_level_deep(tmp_path: Path) -> None:
    skill(tmp_path / "many", "b", GOOD)
    skill(tmp_path / "many", "a", GOOD)
    skill(tmp_path / "many" / "deep", "c", GOOD)
    one = skill(tmp_path, "one", GOOD, sub__SKILL="x")
    found = SkillManager.discover_dirs([tmp_path / "many", one])
    assert [each.id for each in found.list()] == ["a", "b", "one"]
    with pytest.raises(SkillError, match="two skills 'a'") as twice:
        SkillManager.discover_dirs([tmp_path / "many", tmp_path / "many" / "a"])
    assert twice.value.kind == "duplicate"
    with pytest.raises(SkillError) as missing:
        SkillManager.discover_dirs([tmp_path / "none"])
    assert missing.value.kind == "root_not_found"


def test_resources_are_read_by_their_path_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = skill(tmp_path, "pdf", GOOD, ref__forms="how to fill", logo=b"\x89PNG\xff")
    os.symlink("../secret", folder / "out")
    os.symlink("/etc", folder / "etc")
    os.symlink("ref/forms", folder / "in")
    os.mkfifo(folder / "pipe")
    found = SkillManager.discover_dirs([folder])
    assert found.read("pdf").resources == ("in", "logo", "ref/forms")
    assert found.read("pdf", "ref/forms").content == found.read("pdf", "./ref//forms").content == "how to fill"
    assert found.read("pdf", "in").content == "how to fill"
    for path in ("../secret", "/etc/passwd", "out", "etc", "ref/../../secret", "ref/..", "", "a\0b", "..\\secret"):
        with pytest.raises(SkillError) as refused:
            found.read("pdf", path)
        assert refused.value.kind == "invalid_path", path
    for path, kind in (("none", "resource_not_found"), ("SKILL.md", "resource_not_found"), ("logo", "io")):
        with pytest.raises(SkillError) as wrong:
            found.read("pdf", path)
        assert (wrong.value.kind, wrong.value.skill_id) == (kind, "pdf")
    with pytest.raises(SkillError, match="There are: pdf") as unknown:
        found.read("PDF tools")
    assert unknown.value.kind == "skill_not_found"
    shutil.rmtree(folder)
    assert found.read("pdf", "ref/forms").content == "how to fill", "it was read when it was found"


def test_skills_are_bounded(tmp_path: Path) -> None:
    skill(tmp_path, "big", GOOD, data=b"x" * (MAX_SKILLS_BYTES + 1))
    with pytest.raises(SkillError, match="bytes"):
        SkillManager.discover_dirs([tmp_path])


async def test_a_model_sees_the_index_and_reads_the_rest(tmp_path: Path, home: Path) -> None:
    skill(tmp_path, "pdf-tools", GOOD, ref__forms="how to fill")
    skill(tmp_path, "broken", "no front matter")
    seen: list[Any] = []

    def look(request: Any) -> Any:
        seen.append(request)
        return calls(
            call("readSkill", skill_id="pdf-tools"),
            call("readSkill", skill_id="pdf-tools", path="ref/forms"),
            call("readSkill", skill_id="pdf-tools", path="../x"),
            call("readSkill", skill_id="nope"),
        )

    agent = scripted(look, "done", tools=[], sandbox=None, system_prompt="Be brief.", skills=[tmp_path])
    assert agent.registry.names() == ["readSkill"]
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        assert (await session.run("go")).text == "done"
        shown = results(await session.transcript())
    (request,) = seen
    assert request.system.startswith("Be brief.\n\n")
    assert "- pdf-tools: PDF tools. Splits and joins" in request.system
    assert "MARKER" not in request.system
    assert json.loads(shown[0].text) == {
        "skill_id": "pdf-tools",
        "path": "",
        "content": "Use the MARKER.",
        "resources": ["ref/forms"],
    }
    assert json.loads(shown[1].text)["content"] == "how to fill"
    assert [block.is_error for block in shown] == [False, False, True, True]
    assert shown[2].text.startswith("invalid_path: ")
    assert scripted("x", tools=[], sandbox=None).registry.names() == []


def test_skills_travel_with_their_agent(tmp_path: Path) -> None:
    skill(tmp_path, "pdf", GOOD, logo=b"\x00\xff")
    agent = AgentConfig(name="a", provider=Scripted(["x"]), skills=[tmp_path])
    packet = pack(agent)
    assert packet.locals == {}
    shutil.rmtree(tmp_path / "pdf")
    again = unpack(packet)
    assert again.skill_manager.read("pdf").content == "Use the MARKER."
    assert again.registry.names() == ["readSkill"]
    assert again.instructions == agent.instructions
    assert pack(again).digest == packet.digest


async def test_a_stored_session_goes_on_without_the_folder(
    tmp_path: Path, home: Path, shared: MemoryObjectStore
) -> None:
    skill(tmp_path, "pdf", GOOD)
    agent = scripted("one", calls(call("readSkill", skill_id="pdf")), "two", tools=[], sandbox=None, skills=[tmp_path])
    async with AgentRuntime(Storage.over(shared)) as runtime:
        await (await runtime.create_session(agent, "s")).run("go")
    shutil.rmtree(tmp_path / "pdf")
    async with AgentRuntime(Storage.over(shared)) as runtime:
        session = await runtime.open("s")
        assert (await session.run("on")).text == "two"
        assert "MARKER" in results(await session.transcript())[0].text


def test_skills_in_a_config(tmp_path: Path) -> None:
    skill(tmp_path / "skills", "pdf", GOOD)
    (tmp_path / "s.yaml").write_text("- done\n")
    (tmp_path / "agent.yaml").write_text("name: a\nprovider: scripted:s.yaml\nskills: [./skills]\n")
    assert [one.id for one in AgentConfig.load(tmp_path / "agent.yaml").skill_manager.list()] == ["pdf"]
    (tmp_path / "agent.yaml").write_text("name: a\nprovider: scripted:s.yaml\nskills: ./skills\n")
    with pytest.raises(ConfigError, match="no list"):
        AgentConfig.load(tmp_path / "agent.yaml")
    with pytest.raises(ConfigError, match="no folder of skills"):
        AgentConfig(name="a", provider=Scripted(["x"]), skills=[tmp_path / "none"])

    async def readSkill() -> str:  # noqa: N802  # the name is the point
        return ""

    with pytest.raises(ConfigError, match="already a tool 'readSkill'"):
        AgentConfig(name="a", provider=Scripted(["x"]), tools=tools(readSkill), skills=[tmp_path / "skills"])
