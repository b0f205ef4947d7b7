"""Hypothesis plays a host: verbs in any order, models that do anything, owners that die; the table of verbs holds.

Each rule knows from the session's state alone what the verb must do: run, refuse by name, or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from scenes import call, calls, default_registry, results

from greenroom import (
    AgentConfig,
    AgentRuntime,
    GreenroomError,
    Interrupt,
    InterruptPending,
    Limits,
    RunFailed,
    RunResult,
    RunStatus,
    Scripted,
    Storage,
    ToolRegistry,
    UnknownInterrupt,
    UsageError,
)
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeClock, FakeSandboxes, Fault, FaultyStore, SeededIds, strict_history

pytestmark = pytest.mark.slow

CALLS = st.sampled_from(
    [
        call("look", what="x"),
        call("send", to="x"),
        call("fail", why="x"),
        call("bash", command="x"),
        call("form", what="x"),
        call("askFollowupQuestion", question="?"),
        call("nope"),
        call("send", wrong=1),
    ]
)
ENTRIES = st.one_of(
    st.sampled_from(["text", "", {"text": "cut", "stop": "length", "stop_kind": "length"}]),
    st.lists(CALLS, min_size=1, max_size=4).map(lambda made: calls(*made)),
    st.sampled_from(
        [
            {"error": {"kind": "provider_rate_limited", "retry_after": 3}},
            {"error": {"kind": "provider"}},
            {"error": {"kind": "provider_permanent"}},
        ]
    ),
)
SCRIPTS = st.lists(ENTRIES, max_size=5)
ENDED = ("Ready", "Success", "Fail", "Interrupted")


class Host(RuleBasedStateMachine):
    """One session over one store, driven by whichever runtime lives now."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.objects = MemoryObjectStore()
        self.script: list[Any] = []
        self.effects: Counter[str] = Counter()
        self.revision = 0
        self.said = 0
        self.lives = 0

    # -- the world

    @initialize()
    def begin(self) -> None:
        self.runner.run(self._open())

    async def _open(self) -> None:
        """A new process: fresh runtime, fresh sandbox, the same store."""
        self.lives += 1
        self.store = FaultyStore(self.objects)
        self.clock = FakeClock()
        self.runtime = AgentRuntime(
            Storage.over(self.store), sandboxes=FakeSandboxes(), clock=self.clock, ids=SeededIds(self.lives)
        )
        agent = self._agent()
        try:
            self.session = await self.runtime.open("s", agent)
        except LookupError:
            self.session = await self.runtime.create_session(agent, "s")

    def _agent(self) -> AgentConfig:
        tools = ToolRegistry(default_registry())

        @tools.tool(effect="read_only")
        async def look(what: str) -> str:
            return "seen"

        @tools.tool
        async def send(to: str) -> str:
            self.effects["send"] += 1
            return "sent"

        @tools.tool
        async def fail(why: str) -> str:
            raise ValueError(why)

        @tools.tool(may_interrupt=True)
        async def form(what: str) -> Interrupt:
            return Interrupt(kind="form", payload={})

        def reply(request: Any) -> Any:
            return self.script.pop(0) if self.script else "out of words"

        limits = Limits(max_iter=4, max_consecutive_fail=2)
        return AgentConfig(name="a", provider=Scripted([reply] * 400), tools=tools, sandbox="host", limits=limits)

    def drive(self, verb: Any) -> Any:
        """The verb's result; a failed run is a result too."""
        try:
            return self.runner.run(self.clock.run(verb))
        except RunFailed as failed:
            if failed.resumable:
                raise
            return failed.result

    def look(self) -> Any:
        return self.runner.run(self.session.status())

    def stopped(self, result: RunResult, by: int = 1) -> None:
        """A verb ran to a stop: the revision tells how many writes of that kind there were."""
        self.revision += by
        assert result.revision == self.revision

    def text(self) -> str:
        self.said += 1
        return f"message {self.said}"

    # -- verbs

    @rule(script=SCRIPTS)
    def run(self, script: list[Any]) -> None:
        info = self.look()
        self.script = script
        if info.waiting_for is None:
            self.stopped(self.drive(self.session.run(self.text())))
        elif info.waiting_for.kind == "followup_question":
            self.stopped(self.drive(self.session.run(self.text())), by=2)
        else:
            with pytest.raises(InterruptPending):
                self.drive(self.session.run(self.text()))

    @rule(script=SCRIPTS)
    def submit_and_run(self, script: list[Any]) -> None:
        info = self.look()
        self.script = script
        if info.waiting_for is not None and info.waiting_for.kind != "followup_question":
            with pytest.raises(InterruptPending):
                self.drive(self.session.submit(self.text()))
            return
        state = self.drive(self.session.submit(self.text()))
        answered = info.waiting_for is not None
        assert state.name == ("ToolExecuting" if answered else "Ready")
        self.stopped(self.drive(self.session.run()), by=2 if answered else 1)

    @rule()
    def run_nothing(self) -> None:
        info = self.look()
        refusal = InterruptPending if info.waiting_for is not None else UsageError
        with pytest.raises(refusal):
            self.drive(self.session.run())

    @rule(script=SCRIPTS)
    def resume(self, script: list[Any]) -> None:
        info = self.look()
        self.script = script
        result = self.drive(self.session.resume())
        if info.state == "Interrupted":
            self.stopped(result)
        elif info.waiting_for is not None:
            assert result.status is RunStatus.suspended
            assert result.revision == self.revision
        else:
            assert result is None

    @rule(script=SCRIPTS)
    def answer(self, script: list[Any]) -> None:
        info = self.look()
        self.script = script
        if info.waiting_for is None:
            with pytest.raises(UnknownInterrupt):
                self.drive(self.session.answer("s/1/1/0", "yes"))
            return
        request = f"answer {self.said}-{info.revision}"
        first = self.drive(self.session.answer(info.waiting_for.id, "yes", request_id=request))
        self.stopped(first, by=2)
        assert self.drive(self.session.answer(info.waiting_for.id, "yes", request_id=request)) == first

    @rule()
    def cancel(self) -> None:
        info = self.look()
        result = self.drive(self.session.cancel("enough"))
        if info.waiting_for is not None:
            assert result.status is RunStatus.cancelled
            self.stopped(result)
        else:
            assert result is None

    @rule(script=SCRIPTS, after=st.integers(0, 12))
    def run_and_cancel(self, script: list[Any], after: int) -> None:
        if self.look().waiting_for is not None:
            return
        self.script = script

        async def both() -> RunResult | None:
            run = asyncio.ensure_future(self.session.run(self.text()))
            for _ in range(after):
                await asyncio.sleep(0)
            cancelled = await self.session.cancel("enough")
            await asyncio.wait([run])
            _ = run.exception()
            return cancelled

        before = self.revision
        cancelled = self.drive(both())
        info = self.look()
        if cancelled is not None:  # None: it came before there was anything to cancel
            assert info.state in ENDED, "nothing waits for an answer after a cancel"
        assert info.revision - before in (1, 2), "a run, and perhaps the question that it had come to"
        self.revision = info.revision

    @rule(script=SCRIPTS, requests=st.integers(1, 12), resumes=st.booleans())
    def die_in_a_run(self, script: list[Any], requests: int, resumes: bool) -> None:
        """The store answers nothing from some request on; another process goes on, or only cancels."""
        if self.look().waiting_for is not None:
            return
        self.script = [*script]
        self.store.faults.append(Fault("unavailable", skip=requests, times=10**9))

        async def dies() -> None:
            with contextlib.suppress(GreenroomError):  # however its death shows: only what is stored counts
                await self.session.run(self.text())
            await self.runtime.close()

        self.runner.run(self.clock.run(dies()))
        self.runner.run(self._open())
        info = self.look()
        self.revision = info.revision
        if info.owner is not None:
            result = self.drive(self.session.resume() if resumes else self.session.cancel("dead"))
            if result is not None:
                self.stopped(result)

    @rule()
    def restart(self) -> None:
        self.runner.run(self.runtime.close())
        self.runner.run(self._open())

    # -- what always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "session"):
            return
        info, transcript = self.look(), self.runner.run(self.session.transcript())
        assert info.owner is None
        assert info.revision == self.revision
        assert info.state in (*ENDED, "WaitingForUser")
        last = transcript.messages[-1] if transcript.messages else None
        waiting = [made.id for made in last.tool_calls] if info.waiting_for is not None and last is not None else []
        strict_history(transcript.messages, waiting)
        sent = [block for block in results(transcript) if block.text == "sent"]
        assert len(sent) <= self.effects["send"]

    def teardown(self) -> None:
        self.runner.run(self.runtime.close()) if hasattr(self, "runtime") else None
        self.runner.close()


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,  # the same search every time; a longer one at random is for those who look for mistakes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_the_table_of_verbs_holds_whatever_a_host_does(home: Path) -> None:
    run_state_machine_as_test(Host, settings=SETTINGS)
