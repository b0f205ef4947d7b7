"""One model call: streams it, tells the watchers, stops it when the run is cancelled. Nothing of a dead try is kept."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.cutting import cut_off_by
from greenroom.runtime.emitter import Emitter
from greenroom.runtime.errors import GreenroomError, ProviderError
from greenroom.runtime.messages import Message, MessageDelta, TextDelta, ThinkingDelta
from greenroom.runtime.middleware import HookFailed
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.results import FailureKind


@dataclass(frozen=True, slots=True)
class Cut:
    """The call was cancelled after it had said `text`."""

    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The call failed after it had said `text`."""

    error: ProviderError
    text: str


async def call_model(
    provider: LlmProvider, request: ModelRequest, cancel: CancelToken, emitter: Emitter
) -> Message | Broken | Cut:
    """The whole message, or how far a failed or a cancelled stream had come; raises nothing but HookFailed."""
    said: list[str] = []
    async with cut_off_by(cancel):
        reply = await _consume(provider, request, cancel, emitter, said)
        return reply if isinstance(reply, Message) else Broken(reply, "".join(said))
    return Cut("".join(said))


async def _consume(
    provider: LlmProvider, request: ModelRequest, cancel: CancelToken, emitter: Emitter, said: list[str]
) -> Message | ProviderError:
    message: Message | None = None
    emitted = False
    try:
        async with aclosing(provider.stream(request, cancel)) as deltas:  # type: ignore[type-var]  # streams are generators
            async for delta in deltas:
                emitted = emitted or not isinstance(delta, MessageDelta)
                match delta:
                    case TextDelta(text=text):
                        said.append(text)
                        emitter.emit("text", text=text)
                    case ThinkingDelta(text=text):
                        emitter.emit("thinking", text=text)
                    case MessageDelta(message=whole):
                        message = whole
    except HookFailed:
        raise
    except ProviderError as error:
        error.emitted = error.emitted or emitted
        return error
    except Exception as error:  # a provider's own mistake ends the run, not the process
        hint = error.hint if isinstance(error, GreenroomError) else ""
        return ProviderError(
            f"{type(provider).__name__} raised {type(error).__name__}: {error}",
            kind=FailureKind.provider_permanent,
            emitted=emitted,
            hint=hint,
        )
    if message is None:
        return ProviderError(
            "the stream ended without a message", kind=FailureKind.provider_stream, retryable=True, emitted=emitted
        )
    return message
