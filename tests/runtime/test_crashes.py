"""Crashes everywhere: each scenario under every schedule, no promise broken; and broken journals that are found out.

The named ones are those that an implementation fails most easily: (a) a different batch at recovery, (b) a write that
lands after the recovery's acquire, or whose answer was lost under pipelining. (c), an owner that is stopped and wakes
up, kills real processes: tests/actors/test_cluster.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scenarios import SCENARIOS, both, children, effects, hooked, long_history, mixed, own, plain, saved
from scenes import bash, call, calls, results

from greenroom import AgentConfig, AgentRuntime, Interrupt, Storage, ToolRegistry
from greenroom.runtime import batch, journal, record, transitions
from greenroom.runtime import gate as batch_gate
from greenroom.runtime.journal import Batch, CallRecord, Outcome, Recovery
from greenroom.runtime.messages import Message
from greenroom.runtime.policy import judged
from greenroom.runtime.storage import Head, MemoryObjectStore, SqliteObjectStore
from greenroom.runtime.tree_snapshots import TreeSnapshots
from greenroom.testing import CrashFailure, CrashWorld, FakeSandboxes, Scenario, crash_everywhere

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_no_crash_breaks_a_promise(scenario: Scenario, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if scenario.agent is long_history:
        monkeypatch.setattr(record, "ROLL_BYTES", 4000)  # so that it rolls and folds as a long session does
        monkeypatch.setattr(record, "FOLD_SEGMENTS", 1)
    report = await crash_everywhere(scenario)
    assert report.schedules > 100
    print(f"\n{report}")  # with -s: what was run


# -- a broken journal is found out


def always_runs(call: CallRecord, incarnation: str | None) -> Recovery:
    """Forgets its marks."""
    return Recovery.reuse if call.outcome is not None else Recovery.run


def closes_with_a_lie(batch: Batch) -> Batch:
    """Says of every cancelled call that it did not run."""
    for open_call in batch.open_calls:
        batch = batch.put(open_call.but(outcome=Outcome.error(journal.CANCELLED_BEFORE_START)))
    return batch


def swaps_results(batch: Batch) -> Message:
    """Gives every call the outcome of its neighbour."""
    outcomes = [call.outcome for call in batch.calls]
    turned = outcomes[1:] + outcomes[:1]
    calls = tuple(call.but(outcome=outcome) for call, outcome in zip(batch.calls, turned, strict=True))
    return journal.results_message(batch.but(calls=calls))


async def does_not_wait(self: Any) -> None:
    """Goes on before its marks are durable."""
    self.save_soon()


def covers_everything(self: Head, through: str | None) -> tuple[str, ...]:
    """Takes every call for saved."""
    return ()


def saves_too_late(self: TreeSnapshots, packed: Any, watermark: Any) -> Any:
    """Has the snapshot cover a call that comes only after it."""
    later = {sid: f"{key.rsplit('/', 2)[0]}/{int(key.rsplit('/', 2)[1]) + 1}/0" for sid, key in watermark.items()}
    return PUT(self, packed, later)


async def lets_answers_pass(batch: Batch, policy: Any, session_id: str) -> Batch:
    """Judges only what no hook has answered."""
    ruled = await JUDGED(batch, policy, session_id)
    for answered in [one for one in batch.calls if one.answered is not None]:
        ruled = ruled.put(answered)
    return ruled


JUDGED = judged
HOOKS = next(scenario for scenario in SCENARIOS if scenario.agent is hooked)
PUT = TreeSnapshots.put
LOST = next(scenario for scenario in SCENARIOS if scenario.agent is saved)
BROKEN: list[tuple[Any, str, Any, Any, str]] = [
    (batch, "decide", always_runs, effects, "began 2 times"),
    (transitions, "close_cancelled", closes_with_a_lie, plain, "said not to have run"),
    (transitions, "results_message", swaps_results, mixed, "never gave"),
    (record.Record, "save", does_not_wait, effects, "."),
    (Head, "uncovered", covers_everything, LOST, "are lost"),
    (batch_gate, "judged", lets_answers_pass, HOOKS, "a denied call was answered"),
    (TreeSnapshots, "put", saves_too_late, LOST, "are lost"),
]


@pytest.mark.parametrize(("place", "name", "broken", "agent", "said"), BROKEN, ids=[row[1] for row in BROKEN])
async def test_a_broken_journal_is_caught(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Any, agent: Any, said: str
) -> None:
    monkeypatch.setattr(place, name, broken)
    with pytest.raises(CrashFailure, match=said) as failure:
        await crash_everywhere(agent)
    replay = str(failure.value.schedule)
    assert f"replay={replay!r}" in str(failure.value)
    assert len(failure.value.schedule.faults) <= 2, "the smallest one"
    with pytest.raises(CrashFailure, match=said):
        await crash_everywhere(agent, replay=replay)
    monkeypatch.undo()
    monkeypatch.setenv("GREENROOM_HOME", str(home))
    await crash_everywhere(agent, replay=replay)


async def test_a_tool_declared_idempotent_that_is_not_is_the_users_to_find(home: Path) -> None:
    """A check of one's own: the harness cannot know what an effect does outside."""
    sent: list[str] = []

    def agent() -> AgentConfig:
        sent.clear()
        tools = ToolRegistry()

        @tools.tool(effect="idempotent")
        async def send(to: str) -> str:
            sent.append(to)
            return "ok"

        return own(calls(call("send", to="a")), "done", tools=tools)

    async def check(world: CrashWorld) -> list[str]:
        return [f"sent {len(sent)} times"] if len(sent) > 1 else []

    with pytest.raises(CrashFailure, match="sent 2 times"):
        await crash_everywhere(Scenario("send", agent, check=check))


async def test_it_runs_on_a_store_of_ones_own(home: Path, tmp_path: Path) -> None:
    numbers = iter(range(10**6))
    scenario = Scenario(
        "SQLite",
        lambda: own(calls(call("send", to="a")), "done"),
        objects=lambda: SqliteObjectStore(tmp_path / f"{next(numbers)}.db"),
        sandboxes=("dies",),
    )
    assert (await crash_everywhere(scenario, several_faults=5)).schedules > 50


async def test_a_plain_agent_is_a_scenario_and_a_bad_replay_is_named(home: Path) -> None:
    assert (await crash_everywhere(plain(), several_faults=2)).scenario == "agent"
    with pytest.raises(ValueError, match="kill@17"):
        await crash_everywhere(plain, replay="sandbox-dies explode@3")
    with pytest.raises(ValueError, match="sandbox-dies"):
        await crash_everywhere(plain, replay="kill@3")


async def test_a_scenario_that_never_ends_is_said_to_be_stuck(home: Path) -> None:
    async def drive(world: CrashWorld) -> None:
        await world.session()
        await asyncio.Event().wait()

    with pytest.raises(CrashFailure, match="nothing happens any more"):
        await crash_everywhere(Scenario("hangs", plain, drive))


# -- the named ones


async def test_a_a_recovery_whose_model_would_ask_for_another_batch_goes_on_with_the_recorded_one(home: Path) -> None:
    """(a) Crash after read-only A of [A, B], then a model with a different batch: each result is its own call's."""
    objects = MemoryObjectStore()
    crashed: list[str] = []

    def tools(*, dies: bool) -> ToolRegistry:
        made = ToolRegistry()

        @made.tool(effect="read_only")
        async def look(what: str) -> str:
            return f"seen {what}"

        @made.tool
        async def send(to: str) -> str:
            if dies:
                crashed.append(to)
                await asyncio.sleep(3600)
            return f"sent to {to}"

        return made

    first_script = [calls(call("look", what="A"), call("send", to="B")), "done"]
    other_script = [calls(call("send", to="X"), call("look", what="Y")), "done"]
    first = AgentRuntime(Storage.over(objects), sandboxes=FakeSandboxes())
    session = await first.create_session(own(*first_script, tools=tools(dies=True)), "s")
    run = asyncio.create_task(session.run("go"))
    while not crashed:
        await asyncio.sleep(0)
    async with AgentRuntime(Storage.over(objects), sandboxes=FakeSandboxes()) as second:
        again = await second.open("s", own(*other_script, tools=tools(dies=False)))
        result = await again.resume()
        assert result is not None
        assert result.text == "done"
        found = results(await again.transcript())
        assert found[0].text == "seen A"
        assert found[1].text == journal.OUTCOME_UNKNOWN
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await first.close()


@pytest.mark.parametrize("blow", ["late", "lose"])
@pytest.mark.parametrize("agent", [mixed, children], ids=["mixed", "children"])
async def test_b_a_late_write_and_a_lost_answer_leave_one_lineage(home: Path, blow: str, agent: Any) -> None:
    """(b) At every write: it lands after the recovery's acquire, or landed without an answer. No false Conflict."""
    calm = await _gates(agent)
    tried = 0
    for number, gate in enumerate(calm, 1):
        if gate.writes:
            await crash_everywhere(agent, replay=f"sandbox-survives {blow}@{number}")
            tried += 1
    assert tried > 12


async def _gates(agent: Any) -> Any:
    from greenroom.runtime.testing.crash import _as_scenario, _run
    from greenroom.runtime.testing.schedules import Schedule

    return (await _run(_as_scenario(agent), Schedule(sandbox="survives"), 0)).gates


async def test_a_cancel_is_durable_before_anything_else_and_nothing_runs_after_it(home: Path) -> None:
    """Killed at any gate after its cancel: the next owner parks it, and no effect begins before it is resumed."""
    agent = lambda: both(bash("one"), calls(call("send", to="a"), call("send", to="b")), "done")  # noqa: E731
    after: list[str] = []

    async def drive(world: CrashWorld) -> None:
        session = await world.session()
        if world.life == 1:
            await session.run("go")
            return
        before = sum(world.effects.began.values())
        info = await session.status()
        found = await world.objects.get("tree/s/s/head")
        assert found is not None
        if info.owner is not None and b'"cancel":{' in found[0]:
            result = await session.resume()
            assert result is not None
            after.append(str(result.status))
            assert sum(world.effects.began.values()) == before
        await session.cancel()

    count = 0
    for gate in range(1, 40):
        for later in (1, 2, 3, 5, 8):
            await crash_everywhere(
                Scenario("cancelled", agent, drive), replay=f"sandbox-dies cancel@{gate} kill@{gate + later}"
            )
            count += 1
    assert after.count("cancelled") == len(after) > 10


async def test_an_answer_survives_every_crash_once_it_was_accepted(home: Path) -> None:
    """R to R+1 to R+2, and one answer: asked again with the same request it gives the same result."""
    made = ToolRegistry()

    @made.tool(may_interrupt=True)
    async def form(what: str) -> Interrupt:
        return Interrupt(kind="form", payload={"what": what})

    def agent() -> AgentConfig:
        return own(calls(call("form", what="1")), "done", tools=made)

    async def check(world: CrashWorld) -> list[str]:
        async with AgentRuntime(Storage.over(world.objects), sandboxes=FakeSandboxes()) as runtime:
            session = await runtime.open("s", agent())
            info = await session.status()
            answers = [block.text for block in results(await session.transcript())]
            if info.state != "Success" or world.cancelled:
                return []
            expected = 3 if answers == ["yes"] else 1  # it was asked, or its owner died before that was durable
            return [] if info.revision == expected else [f"revision {info.revision}, answers {answers}"]

    assert (await crash_everywhere(Scenario("answer", agent, check=check, sandboxes=("dies",)))).schedules > 100
