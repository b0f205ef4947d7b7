"""Schedules of the crash harness: which blow falls at which gate. Values with a short text form, to replay them by."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Blow = Literal["kill", "lose", "delay", "late", "cancel"]
BLOWS: tuple[Blow, ...] = ("kill", "lose", "delay", "late", "cancel")


@dataclass(frozen=True, slots=True)
class Gate:
    """A place where something may go wrong: before or after one effect of the owner; `writes`: to the store."""

    name: str
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """`blow` at gate `gate`, counted from 1, of life `life`, counted from 1: the owner's first process, its next, …"""

    blow: Blow
    gate: int
    life: int = 1

    def __str__(self) -> str:
        return f"{self.blow}@{self.gate}" + (f"/{self.life}" if self.life > 1 else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What goes wrong in one run of a scenario, and what becomes of its sandbox when the owner is killed.

    sandbox: "dies" (with its owner's process, as in the embedded edition) or "survives" (as on Ray, in its own actor).
    """

    faults: tuple[Fault, ...] = ()
    sandbox: Literal["dies", "survives"] = "dies"

    def __str__(self) -> str:
        return " ".join([f"sandbox-{self.sandbox}", *map(str, self.faults)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From its text, as a failure prints it; raises ValueError."""
        first, *rest = text.split() or [""]
        sandbox = first.removeprefix("sandbox-")
        if sandbox not in ("dies", "survives"):
            raise ValueError(f"{text!r} is no schedule: it reads like 'sandbox-dies kill@17 kill@4/2'")
        faults = []
        for word in rest:
            found = re.fullmatch(rf"({'|'.join(BLOWS)})@(\d+)(?:/(\d+))?", word)
            if found is None:
                raise ValueError(f"{word!r} is no fault: it reads like kill@17, or kill@17/2 in the second life")
            faults.append(Fault(found.group(1), int(found.group(2)), int(found.group(3) or 1)))  # type: ignore[arg-type]  # one of BLOWS
        return cls(tuple(faults), sandbox)  # type: ignore[arg-type]  # checked above

    def at(self, life: int, gate: int) -> Blow | None:
        return next((fault.blow for fault in self.faults if (fault.life, fault.gate) == (life, gate)), None)

    def without(self, fault: Fault) -> Schedule:
        return Schedule(tuple(kept for kept in self.faults if kept != fault), self.sandbox)


def single(gates: Sequence[Gate], sandbox: Literal["dies", "survives"]) -> Iterator[Schedule]:
    """A kill at every gate; an answer lost, a write delayed and a write that lands late at every write; a cancel."""
    for number, gate in enumerate(gates, 1):
        yield Schedule((Fault("kill", number),), sandbox)
        if gate.writes:
            yield Schedule((Fault("lose", number),), sandbox)
            yield Schedule((Fault("delay", number),), sandbox)
            yield Schedule((Fault("late", number),), sandbox)
        yield Schedule((Fault("cancel", number),), sandbox)


def several(gates: Sequence[Gate], sandbox: Literal["dies", "survives"], count: int, seed: int) -> Iterator[Schedule]:
    """`count` schedules of two or three faults, drawn with this seed: also in the life of whoever recovers."""
    chance = random.Random(seed)
    for _ in range(count):
        faults = [Fault(chance.choice(("kill", "delay", "late", "cancel")), chance.randint(1, len(gates)))]
        first = faults[0]
        if first.blow in ("late", "delay") and not gates[first.gate - 1].writes:
            faults[0] = first = Fault("kill", first.gate)
        if first.blow in ("cancel", "delay"):
            faults.append(Fault("kill", first.gate + chance.randint(1, 12)))
        faults.append(Fault(chance.choice(("kill", "lose", "cancel")), chance.randint(1, 25), 2))
        yield Schedule(tuple(faults), sandbox)
