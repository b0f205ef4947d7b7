"""Background jobs in real sandboxes: output is given once, states are true, and nothing outlives its owner."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scenes import alive, bash, call, calls, default_registry, results, scripted, until

from greenroom import AgentRuntime, SandboxLimits, SandboxSpec, SubAgent, ToolRegistry, register_default_tools
from greenroom.runtime.agents import pack, unpack
from greenroom.runtime.calls import CallRef, ExecResult, JobState
from greenroom.runtime.errors import JobNotFound, SandboxDied, SandboxError
from greenroom.runtime.jobs import KEPT_ENDED, MAX_JOBS
from greenroom.runtime.operations import CheckJob, Execute, KillJob, StartJob
from greenroom.runtime.tree_sandbox import SharedSandbox
from greenroom.sandbox.factory import ShippedSandboxes


@pytest.fixture(params=["host", "bubblewrap"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SharedSandbox]:
    spec = SandboxSpec(kind=request.param, workspace=str(tmp_path / "ws"))
    sandbox = SharedSandbox(await ShippedSandboxes().open(spec, "r"))
    yield sandbox
    await sandbox.close()


@pytest.fixture
def marker() -> str:
    return f"{600 + uuid.uuid4().int % 10**9}"


class Caller:
    """A session's calls, each under a key of its own."""

    def __init__(self, sandbox: SharedSandbox, session: str = "s") -> None:
        self._sandbox = sandbox
        self._session = session
        self._count = 0

    def ref(self) -> CallRef:
        self._count += 1
        return CallRef(self._session, 1, f"{self._session}/1/{self._count}/0", "d", step=self._count)

    async def start(self, command: str, yield_after: float = 0.2) -> Any:
        return await self._sandbox.perform(self.ref(), StartJob(command, yield_after))

    async def job(self, command: str) -> JobState:
        started = await self.start(command)
        assert isinstance(started, JobState), started
        return started

    async def check(self, id: str, wait: float | None = None, ref: CallRef | None = None) -> JobState:
        found = await self._sandbox.perform(ref or self.ref(), CheckJob(id, wait))
        assert isinstance(found, JobState)
        return found

    async def kill(self, id: str) -> JobState:
        found = await self._sandbox.perform(self.ref(), KillJob(id))
        assert isinstance(found, JobState)
        return found


async def test_a_command_that_ends_in_its_window_is_no_job(sandbox: SharedSandbox) -> None:
    caller = Caller(sandbox)
    ended = await caller.start("echo a; exit 3", 5)
    assert (ended.status, ended.exit_code, ended.output) == ("exited", 3, "a\n")
    assert not sandbox.busy


async def test_a_job_gives_its_output_once_and_keeps_its_end(sandbox: SharedSandbox) -> None:
    caller = Caller(sandbox)
    job = await caller.job("echo a; sleep 0.6; echo b; exit 7")
    assert (job.status, job.output, job.exit_code) == ("running", "a\n", None)
    assert sandbox.busy
    ended = await caller.check(job.id, wait=10)
    assert (ended.status, ended.exit_code, ended.output) == ("exited", 7, "b\n")
    again = await caller.check(job.id)
    assert (again.status, again.exit_code, again.output) == ("exited", 7, "")
    assert await caller.kill(job.id) == again, "it keeps its own end"
    assert not sandbox.busy


async def test_a_look_waits_a_moment_for_news_and_no_longer(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"sleep 0.6; echo soon; sleep {marker}")
    began = time.monotonic()
    assert (await caller.check(job.id)).output == "soon\n"
    assert time.monotonic() - began < 1.8
    began = time.monotonic()
    assert (await caller.check(job.id)).output == ""
    assert 1.8 < time.monotonic() - began < 5


async def test_no_line_is_lost_or_told_twice_however_a_reader_looks(sandbox: SharedSandbox) -> None:
    caller = Caller(sandbox)
    job = await caller.job("for n in $(seq 300); do echo line-$n-\u00e4\u20ac; [ $((n % 50)) = 0 ] && sleep 0.05; done")
    seen = job.output
    while job.status == "running":
        job = await caller.check(job.id)
        seen += job.output
    assert seen.split() == [f"line-{n}-\u00e4\u20ac" for n in range(1, 301)]


async def test_the_same_look_gives_the_same_and_an_ended_one_gives_its_part_back(
    sandbox: SharedSandbox, marker: str
) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"echo a; sleep 0.5; echo b; sleep {marker}")
    ref = caller.ref()
    first = await caller.check(job.id, ref=ref)
    assert first.output == "b\n"
    assert await caller.check(job.id, ref=ref) == first, "a reply that was lost"
    await sandbox.end(ref)
    assert (await caller.check(job.id)).output == "b\n", "a call that was ended before its result was saved"
    assert (await caller.check(job.id)).output == ""


async def test_killing_ends_the_whole_tree_and_may_come_again(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"trap '' TERM; setsid sleep {marker} & sleep {marker}")
    await until(lambda: len(alive(f"sleep\0{marker}")) == 2, "the tree runs")
    killed = await caller.kill(job.id)
    assert (killed.status, killed.exit_code) == ("killed", None)
    assert alive(marker) == []
    assert (await caller.kill(job.id)).status == "killed"
    assert (await caller.check(job.id)).status == "killed"


async def test_a_job_leaves_the_sandbox_to_others(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"sleep {marker}")
    result = await sandbox.perform(caller.ref(), Execute("echo free"))
    assert isinstance(result, ExecResult)
    assert result.output == "free\n"
    busy = asyncio.create_task(sandbox.perform(caller.ref(), Execute("sleep 1")))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    assert (await caller.kill(job.id)).status == "killed"
    assert time.monotonic() - began < 0.9, "it does not wait for the command"
    await busy


async def test_cancelling_in_the_window_ends_the_command(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    task = asyncio.create_task(caller.start(f"sleep {marker}", 60))
    await until(lambda: alive(marker), "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []
    assert not sandbox.busy


async def test_an_id_means_one_job_of_one_sandbox(sandbox: SharedSandbox, tmp_path: Path) -> None:
    caller = Caller(sandbox)
    job = await caller.job("sleep 5")
    other = SharedSandbox(await ShippedSandboxes().open(SandboxSpec(kind="host", workspace=str(tmp_path / "o")), "o"))
    try:
        theirs = await Caller(other).job("sleep 5")
        assert theirs.id != job.id
        for id in (theirs.id, "job-1", "", job.id + "0"):
            with pytest.raises(JobNotFound, match="no background job"):
                await caller.check(id)
            with pytest.raises(JobNotFound):
                await caller.kill(id)
    finally:
        await other.close()


async def test_jobs_and_their_output_are_bounded(sandbox: SharedSandbox) -> None:
    caller = Caller(sandbox)
    flood = await caller.job("yes")
    await asyncio.sleep(1)
    seen = await caller.check(flood.id)
    limits = SandboxLimits()
    assert len(seen.output) < limits.output_head + limits.output_tail + 100
    assert seen.dropped_bytes > 0
    await caller.kill(flood.id)
    for _ in range(MAX_JOBS):
        await caller.start("sleep 60", 0)
    with pytest.raises(SandboxError, match="background jobs are running"):
        await caller.start("sleep 60", 0)


async def test_ended_jobs_are_kept_for_a_while(tmp_path: Path) -> None:
    sandbox = SharedSandbox(await ShippedSandboxes().open(SandboxSpec(kind="host", workspace=str(tmp_path)), "r"))
    caller = Caller(sandbox)
    jobs = []
    for _ in range(KEPT_ENDED + 3):
        job = await caller.start("exec sleep 0.01", 0)
        jobs.append(job.id)
        await caller.check(job.id, wait=5)
    assert (await caller.check(jobs[-1])).status == "exited"
    with pytest.raises(JobNotFound):
        await caller.check(jobs[0])
    await sandbox.close()


async def test_the_jobs_of_one_session_end_without_the_others(sandbox: SharedSandbox, marker: str) -> None:
    child, parent = Caller(sandbox, "r~child"), Caller(sandbox, "r")
    theirs, ours = await child.job(f"sleep {marker}"), await parent.job(f"sleep {marker}")
    await sandbox.end_jobs("r~child")
    assert (await child.check(theirs.id)).status == "killed"
    assert (await parent.check(ours.id)).status == "running"


async def test_a_job_whose_process_was_lost_is_said_to_be_lost_and_gives_what_it_had(
    sandbox: SharedSandbox, marker: str
) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"echo a; sleep 0.4; echo b; kill -9 $PPID; sleep {marker}")
    seen = await caller.check(job.id, wait=10)
    assert (seen.status, seen.output) == ("lost", "b\n")
    assert (await caller.kill(job.id)).status == "lost"
    assert alive(marker) == []


async def test_killing_reaches_what_a_job_left_behind(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    job = await caller.job(f"setsid sleep {marker} & sleep 0.4; exit 3")
    assert (await caller.check(job.id, wait=10)).exit_code == 3
    assert alive(f"sleep\0{marker}")
    ended = await caller.kill(job.id)
    assert (ended.status, ended.exit_code) == ("exited", 3), "its own end"
    assert alive(marker) == []


async def test_what_is_given_out_at_once_is_given_whole(tmp_path: Path) -> None:
    limits = SandboxLimits(output_head=200_000, output_tail=200_000)
    spec = SandboxSpec(kind="host", workspace=str(tmp_path), limits=limits)
    sandbox = SharedSandbox(await ShippedSandboxes().open(spec, "r"))
    caller = Caller(sandbox)
    job = await caller.job("sleep 0.4; echo FIRST; head -c 300000 /dev/zero | tr '\\0' x")
    seen = await caller.check(job.id, wait=10)
    assert seen.output.startswith("FIRST\n")
    assert (len(seen.output), seen.dropped_bytes) == (300_006, 0)
    await sandbox.close()


async def test_an_ending_is_not_cut_short_by_another(sandbox: SharedSandbox, marker: str) -> None:
    caller = Caller(sandbox)
    ref = caller.ref()
    beats = f"trap '' TERM; while :; do echo x >> beats; sleep 0.02; done # {marker}"
    task = asyncio.create_task(sandbox.perform(ref, Execute(beats)))
    await until(lambda: alive(marker), "it runs")
    task.cancel()
    await asyncio.sleep(0.1)
    await sandbox.end(ref)
    assert alive(marker) == []
    await asyncio.wait([task])


# -- in a session

SOON = default_registry(yield_after=0.3)


def ids(text: str) -> str:
    return str(json.loads(text)["id"])


async def test_a_model_starts_looks_after_and_ends_a_job(home: Path, marker: str) -> None:
    def look(tool: str) -> Any:
        async def entry(request: Any) -> dict[str, Any]:
            id = ids(next(m for m in reversed(request.messages) if m.role == "tool").content[0].text)
            return calls(call(tool, id=id))

        return entry

    agent = scripted(bash(f"echo up; sleep {marker}"), look("check"), look("kill"), look("check"), "done", tools=SOON)
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        result = await session.run("go")
        assert (result.text, result.background_tasks) == ("done", ())
        shown = [json.loads(block.text) for block in results(await session.transcript())]
        assert [one["status"] for one in shown] == ["running", "running", "killed", "killed"]
        assert [one["output"] for one in shown] == ["up\n", "", "", ""]
        assert alive(marker) == []


async def test_a_job_outlives_its_run_is_named_in_the_result_and_ends_with_the_runtime(home: Path, marker: str) -> None:
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(scripted(bash(f"sleep {marker}"), "started", "still there", tools=SOON))
        result = await session.run("go")
        (job,) = result.background_tasks
        assert (await session.status()).background_tasks == (job,)
        assert (await session.run("and now?")).background_tasks == (job,)
        assert alive(marker)
    assert alive(marker) == []


async def test_a_sub_agents_jobs_end_with_it(home: Path, marker: str) -> None:
    child = scripted(bash(f"sleep {marker}"), "left something running", tools=SOON)
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(
            scripted(calls(call("helper", task="t")), "done", subagents={"helper": SubAgent(child)})
        )
        assert (await session.run("go")).background_tasks == ()
        assert alive(marker) == []


async def test_the_window_is_two_seconds_unless_said_otherwise_and_travels_with_the_agent() -> None:
    for window, wanted in ((None, None), (7.5, 7.5)):
        agent = scripted("x", tools=default_registry(yield_after=window))
        bash_tool = unpack(pack(agent)).registry.get("bash")
        assert bash_tool is not None
        assert bash_tool.spec.yield_after == wanted
    plain = ToolRegistry()
    register_default_tools(plain, trust="sandboxed")
    assert [tool.spec.yield_after for tool in plain if tool.spec.yield_after is not None] == [2.0]


async def test_an_unknown_id_is_an_error_for_the_model(home: Path) -> None:
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(
            scripted(calls(call("check", id="job-old-1"), call("kill", id="job-old-1")), "done")
        )
        await session.run("go")
        blocks = results(await session.transcript())
        assert [block.is_error for block in blocks] == [True, True]
        assert "gone" in blocks[0].text


async def test_output_that_a_cancelled_batch_has_recorded_is_not_told_again(home: Path, marker: str) -> None:
    def entry(*waits: float) -> Any:
        async def checks(request: Any) -> dict[str, Any]:
            first = next(message for message in request.messages if message.role == "tool")
            return calls(*(call("check", id=ids(first.content[0].text), wait_secs=wait) for wait in waits))

        return checks

    agent = scripted(bash(f"sleep 0.5; echo ONCE; sleep {marker}"), entry(0, 50), entry(0), "done", tools=SOON)
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        run = asyncio.create_task(session.run("go"))
        await asyncio.sleep(2.5)
        await session.cancel("enough")
        assert (await run).background_tasks != ()
        await session.resume()
        told = "".join(block.text for block in results(await session.transcript()))
        assert told.count("ONCE") == 1


async def test_terminating_ends_jobs_and_says_so(home: Path, marker: str) -> None:
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(scripted(bash(f"sleep {marker}"), "started", tools=SOON))
        assert len((await session.run("go")).background_tasks) == 1
        await session.terminate()
        assert (await session.status()).background_tasks == ()
        assert alive(marker) == []


async def test_terminating_a_sub_agent_ends_its_jobs(home: Path, marker: str) -> None:
    child = scripted(bash(f"sleep {marker}"), bash(f"sleep {marker}9"), "never", tools=SOON, name="child")
    parent = scripted(calls(call("helper", task="t")), "done", subagents={"helper": SubAgent(child)})
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(parent)
        run = asyncio.create_task(session.run("go"))
        await until(lambda: alive(f"{marker}9"), "the child is at its second command")
        (child_id,) = (await session.status()).children.values()
        await (await runtime.open(child_id)).terminate()
        await run
        assert (await (await runtime.open(child_id)).status()).background_tasks == ()
        assert alive(marker) == []


async def test_a_sub_agent_whose_sandbox_is_lost_at_its_end_has_ended_well(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(self: SharedSandbox, session_id: str) -> None:
        raise SandboxDied("it is gone")

    monkeypatch.setattr(SharedSandbox, "end_jobs", gone)
    child = scripted(bash("true"), "good", name="child")
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(
            scripted(calls(call("helper", task="t")), "done", subagents={"helper": SubAgent(child)})
        )
        await session.run("go")
        (block,) = results(await session.transcript())
        assert json.loads(block.text)["status"] == "completed"


@pytest.mark.parametrize("kind", ["host", "bubblewrap"])
async def test_a_command_that_is_ended_while_it_begins_gets_its_term_too(kind: str, tmp_path: Path) -> None:
    """However early: else it runs on until the patience with it is over, and is killed."""
    sandbox: Any = await ShippedSandboxes().open(SandboxSpec(kind=kind, workspace=str(tmp_path / "ws")), "r")
    signals = Counter[int | None]()
    for number in range(80):
        process = await sandbox.start("sleep 600")
        await asyncio.sleep(number / 80 * 0.02)
        await process.kill()
        assert await process.wait(10)
        signals[process.end().signal] += 1
    await sandbox.close()
    assert signals == {15: 80}
