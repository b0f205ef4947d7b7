"""One call of an actor, with Ray's errors turned into ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from greenroom.runtime.errors import ClusterError

T = TypeVar("T")

SILENCE_PAUSE = 0.5
"""Seconds before an actor that did not answer is asked again."""

CALL_TIMEOUT = 60.0
"""Seconds for a short call to an actor, its process's start included."""


class ActorLost(ClusterError):
    """The actor is dead: what it ran has to be taken over."""


class ActorSilent(ClusterError):
    """The actor does not answer now; it may yet. Nothing may be taken over because of this."""


async def ask(reference: Awaitable[Any], timeout: float | None = CALL_TIMEOUT) -> Any:
    """The answer of an actor call; the actor's own error as it was raised, Ray's as ActorLost or ActorSilent."""
    try:
        return await asyncio.wait_for(_as_coroutine(reference), timeout)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else ClusterError(str(error))) from None
    except ActorDiedError as error:
        raise ActorLost(f"an actor died: {_first_line(error)}") from error
    except (ActorUnavailableError, GetTimeoutError, TimeoutError) as error:
        raise ActorSilent(f"an actor does not answer: {_first_line(error)}") from error
    except RayError as error:
        raise ClusterError(f"Ray failed: {_first_line(error)}") from error


async def _as_coroutine(reference: Awaitable[T]) -> T:
    return await reference


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
