"""The working folder of a session's commands: kept from one to the next, over restarts, and for each session alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, results, scripted

from greenroom import AgentRuntime, SandboxSpec, SubAgent
from greenroom.sandbox.factory import ShippedSandboxes


async def outputs(session: Any) -> list[str]:
    return [block.text for block in results(await session.transcript())]


@pytest.fixture(params=["host", "bubblewrap"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxSpec:
    return SandboxSpec(kind=request.param, workspace=str(tmp_path / "ws"))


async def test_the_next_command_begins_where_the_last_one_ended(tmp_path: Path, spec: SandboxSpec) -> None:
    store = f"sqlite:///{tmp_path}/g.db"
    script = (bash("mkdir -p a/b; cd a"), bash("cd b && false"), "x", bash("basename $PWD; cd ../.."), bash("ls"), "ok")
    agent = scripted(*script, sandbox=spec)
    async with AgentRuntime(store) as runtime:
        session = await runtime.create_session(agent, "s")
        await session.run("go")
    async with AgentRuntime(store) as runtime:  # another process, as far as the session is concerned
        session = await runtime.open("s", agent)
        await session.run("on")
        told = [json.loads(text)["output"] for text in await outputs(session)]
    assert told == ["", "", "b\n", "a\n"]


async def test_a_folder_that_is_gone_is_told_of(spec: SandboxSpec) -> None:
    agent = scripted(bash("mkdir a; cd a"), bash("rmdir ../a"), bash("pwd"), bash("pwd"), "ok", sandbox=spec)
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        await session.run("go")
        told = await outputs(session)
    assert "/a: No such file or directory; this runs in" in told[2]
    assert "No such file" not in told[3]


async def test_a_sub_agent_begins_in_the_workspace(spec: SandboxSpec) -> None:
    child = scripted(bash("basename $PWD; cd /"), "child")
    script = (bash("mkdir a; cd a"), calls(call("helper", task="t")), bash("basename $PWD"), "ok")
    agent = scripted(*script, sandbox=spec, subagents={"helper": SubAgent(child)})
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        await session.run("go")
        (below,) = (await session.transcript()).children
        assert json.loads((await outputs(await runtime.open(below, child)))[0])["output"] in ("ws\n", "workspace\n")
        assert json.loads((await outputs(session))[2])["output"] == "a\n"


@pytest.mark.parametrize(
    ("command", "ends_in"),
    [
        ("cd /tmp", "/tmp"),
        ("cd /tmp; exit 4", "/tmp"),
        ("trap 'echo mine' EXIT; cd /tmp", None),  # its own trap takes the place of ours
        ("cd /tmp; exec true", None),
        ("cd /tmp; kill -9 $$", None),
        ("(cd /tmp)", "."),
        ("cd /tmp & wait", "."),
        ("kill() { echo no; }; cd /tmp", "/tmp"),
        ("mkdir d; cd d; rmdir ../d", None),
        ("bash -c 'cd /tmp'", "."),
        ("set -e; cd /tmp; false; cd /", "/tmp"),
    ],
)
async def test_where_a_command_ended(spec: SandboxSpec, command: str, ends_in: str | None) -> None:
    sandbox = await ShippedSandboxes().open(spec, "r")
    try:
        result = await sandbox.execute(command)
        inside = (await sandbox.execute("pwd -P")).output.strip()
        assert result.cwd == (inside if ends_in == "." else ends_in)
        status = {"cd /tmp; exit 4": 4, "set -e; cd /tmp; false; cd /": 1}
        assert result.status == "signaled" or result.exit_code == status.get(command, 0)
        stopped = await sandbox.execute("(sleep 0.2; kill -CONT $$) & kill -STOP $$; echo on")
        assert stopped.output == "on\n", "one that stops itself goes on"
    finally:
        await sandbox.close()
