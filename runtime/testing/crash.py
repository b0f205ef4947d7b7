"""crash_everywhere: a scenario, killed before and after every one of its effects, recovered, and held to the promises.

A finished effectful call is never run again; a call that may have run is never run again unless it is declared
read-only or idempotent; the model is told the truth; every history is one that the strictest provider takes; every
session comes to a stop that nobody owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import RunFailed, SessionError
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage.memory import MemoryObjectStore
from greenroom.runtime.testing.crash_checks import problems
from greenroom.runtime.testing.crash_world import CrashWorld, Stuck
from greenroom.runtime.testing.schedules import Gate, Schedule, several, single

MAX_LIVES = 6
"""Owners that one schedule may use up before it counts as never coming to its end."""

MAX_VERBS = 30
"""Verbs that `drive_to_end` tries in one life."""

Drive = Callable[[CrashWorld], Coroutine[Any, Any, None]]
Fate = Literal["dies", "survives"]


class CrashFailure(AssertionError):
    """A promise was broken. `schedule`: the smallest one found that breaks it; `problems`: what was wrong."""

    schedule: Schedule
    problems: list[str]


@dataclass(frozen=True, slots=True)
class CrashReport:
    """How many schedules were run over how many gates, per fate of the sandbox, and how long that took."""

    scenario: str
    gates: dict[str, int]
    schedules: int
    seconds: float


async def drive_to_end(world: CrashWorld) -> None:
    """What a host does: says "go", answers what is asked, resumes what was cut off, until the session has ended.

    It begins from wherever the session stands, since it is called again in every life of the owner.
    """
    session = await world.session()
    for _ in range(MAX_VERBS):
        info = await session.status()
        try:
            if info.state in ("Success", "Fail"):
                return
            if info.owner is not None:
                await session.resume()  # whoever it was is dead
            elif info.waiting_for is not None:
                yes = {"decision": "allow"} if info.waiting_for.kind == "approval" else "yes"
                await session.answer(info.waiting_for.id, yes, request_id=f"answer-{info.revision}")
            elif info.state != "Ready":
                await session.resume()
            elif (await session.transcript()).messages:
                await session.run()
            else:
                await session.run("go", request_id="go")
        except RunFailed as failed:
            if not failed.resumable:
                return
        except SessionError:
            continue  # it has changed since it was looked at: somebody cancels it, say
    raise Stuck(f"{MAX_VERBS} verbs did not bring the session to its end: it is {(await session.status()).state}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is to be crashed.

    agent: makes a fresh agent for each schedule (tools with their effects in them); drive: brings the session to its
    end from wherever it stands; objects: makes the store; command: what a command in the fake sandbox puts out;
    background: which commands outlast the wait for them; check: more to look at in the end, it answers problems;
    sandboxes: the fates to try.
    """

    name: str
    agent: Callable[[], AgentConfig]
    drive: Drive = drive_to_end
    objects: Callable[[], ObjectStore] = MemoryObjectStore
    command: Callable[[str], str] = field(default=lambda command: f"ran: {command}")
    background: Callable[[str], bool] = lambda command: False
    check: Callable[[CrashWorld], Coroutine[Any, Any, list[str]]] | None = None
    sandboxes: tuple[Fate, ...] = ("dies", "survives")


async def crash_everywhere(
    scenario: Scenario | Callable[[], AgentConfig] | AgentConfig,
    *,
    several_faults: int = 40,
    seed: int = 0,
    replay: str | None = None,
) -> CrashReport:
    """Runs the scenario under every schedule of one fault, and under `several_faults` of two or three, per fate.

    Faults: the owner is killed before or after an effect (a request to the store, a model call, a tool, a message to
    the sandbox); a write's answer is lost; a write is delayed; a write arrives after its owner's death; the session is
    cancelled. An agent, or what makes one, stands for the scenario that runs it to its end.

    seed: of the ids and of the drawn schedules; replay: a schedule as a failure printed it: that one alone is run.
    Raises CrashFailure with the smallest failing schedule that was found.
    """
    scenario = _as_scenario(scenario)
    began = time.perf_counter()
    gates: dict[str, int] = {}
    count = 0
    if replay is not None:
        await _run(scenario, Schedule.parse(replay), seed)
        return CrashReport(scenario.name, gates, 1, time.perf_counter() - began)
    for fate in scenario.sandboxes:
        calm = await _run(scenario, Schedule(sandbox=fate), seed)
        gates[fate] = len(calm.gates)
        for schedule in _schedules(calm.gates, fate, several_faults, seed):
            count += 1
            await _run_or_shrink(scenario, schedule, seed)
    return CrashReport(scenario.name, gates, count, time.perf_counter() - began)


def _schedules(gates: list[Gate], fate: Fate, several_faults: int, seed: int) -> Iterator[Schedule]:
    yield from single(gates, fate)
    yield from several(gates, fate, several_faults, seed)


async def _run_or_shrink(scenario: Scenario, schedule: Schedule, seed: int) -> None:
    try:
        await _run(scenario, schedule, seed)
    except CrashFailure as failure:
        for fault in schedule.faults if len(schedule.faults) > 1 else ():
            await _run_or_shrink(scenario, schedule.without(fault), seed)
        raise failure


async def _run(scenario: Scenario, schedule: Schedule, seed: int) -> CrashWorld:
    world = CrashWorld(schedule, scenario.objects(), scenario.command, scenario.background, seed)
    agent = scenario.agent()
    wrong: list[str] = []
    try:
        for _ in range(MAX_LIVES):
            if await world.live(agent, scenario.drive):
                break
        else:
            wrong.append(f"{MAX_LIVES} owners did not bring it to its end")
        await world.end()
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    wrong += await problems(world, agent)
    if scenario.check is not None:
        wrong += await scenario.check(world)
    await world.objects.close()
    if wrong:
        raise _failure(scenario, schedule, seed, world, wrong)
    return world


def _failure(scenario: Scenario, schedule: Schedule, seed: int, world: CrashWorld, wrong: list[str]) -> CrashFailure:
    where = []
    for fault in schedule.faults:
        name = world.gates[fault.gate - 1].name if fault.life == 1 and fault.gate <= len(world.gates) else "?"
        where.append(f"\n    {fault}: {name}")
    failure = CrashFailure(
        f"scenario {scenario.name!r} under {str(schedule)!r}, seed {seed}:{''.join(where)}\n  "
        + "\n  ".join(wrong)
        + f"\n  replay it: crash_everywhere(scenario, seed={seed}, replay={str(schedule)!r})"
    )
    failure.schedule, failure.problems = schedule, wrong
    return failure


def _as_scenario(scenario: Scenario | Callable[[], AgentConfig] | AgentConfig) -> Scenario:
    if isinstance(scenario, Scenario):
        return scenario
    if isinstance(scenario, AgentConfig):
        agent = scenario
        return Scenario(agent.name, lambda: agent)
    return Scenario(getattr(scenario, "__name__", "scenario"), scenario)
