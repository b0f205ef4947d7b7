"""The HTTP side of models against a server on this machine: the contract, throttling, time limits, keys, presets."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from greenroom import (
    Anthropic,
    CancelToken,
    ConfigError,
    Message,
    ModelRequest,
    OpenAICompatible,
    PreflightError,
    ProviderError,
)
from greenroom.runtime.agents import pack, unpack
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.messages import Delta
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers import provider_from_string
from greenroom.runtime.providers.endpoint import Endpoint
from greenroom.runtime.providers.presets import PRESETS
from greenroom.runtime.testing.model_server import (
    HANG,
    Answer,
    ModelServer,
    end_pieces,
    error_answer,
    model_server,
    text_pieces,
)
from greenroom.testing import ContractBroken, check_provider

pytestmark = pytest.mark.slow


def openai(url: str, **options: Any) -> OpenAICompatible:
    return OpenAICompatible("m", f"{url}/v1", **options)


def anthropic(url: str, **options: Any) -> Anthropic:
    return Anthropic("m", url, **options)


@pytest.mark.parametrize(("make", "dialect"), [(openai, "openai"), (anthropic, "anthropic")])
async def test_both_keep_the_contract(make: Callable[[str], LlmProvider], dialect: Any) -> None:
    await check_provider(make, dialect)


class Restarts(OpenAICompatible):
    """Takes a stream that ended early for a whole one."""

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        try:
            async for delta in super().stream(request, cancel):
                yield delta
        except ProviderError:
            return


class AlwaysRetryable(OpenAICompatible):
    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        try:
            async for delta in super().stream(request, cancel):
                yield delta
        except ProviderError as error:
            error.retryable = True
            raise


@pytest.mark.parametrize("broken", [Restarts, AlwaysRetryable])
async def test_broken_providers_are_found_out(broken: type[OpenAICompatible]) -> None:
    with pytest.raises(ContractBroken):
        await check_provider(lambda url: broken("m", f"{url}/v1"))


def reply() -> Answer:
    return Answer([*text_pieces("openai", ["ok"]), *end_pieces("openai")])


async def ask(provider: Endpoint) -> str:
    request = ModelRequest("s", 0, None, (Message.user("hi"),))
    said = [delta async for delta in provider.stream(request, CancelToken())]
    return said[-1].message.text  # type: ignore[union-attr]  # the last is the message


async def many(server: ModelServer, provider: Endpoint, count: int) -> float:
    server.answers = [reply() for _ in range(count)]
    began = time.monotonic()
    assert await asyncio.gather(*(ask(provider) for _ in range(count))) == ["ok"] * count
    return time.monotonic() - began


async def test_no_more_calls_at_once_than_allowed() -> None:
    async with model_server() as server:
        provider = openai(server.url, max_concurrent=2)
        await many(server, provider, 8)
        assert server.most_at_once <= 2
        free = openai(server.url)
        await many(server, free, 8)
        assert server.most_at_once > 2
        await provider.close()
        await free.close()


async def test_starts_are_spaced_and_a_waiting_call_can_be_given_up() -> None:
    async with model_server() as server:
        provider = openai(server.url, requests_per_minute=600)
        assert await many(server, provider, 4) >= 0.29
        slow = openai(server.url, requests_per_minute=1)
        server.answers = [reply(), reply()]
        assert await ask(slow) == "ok"
        waiting = asyncio.create_task(ask(slow))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await provider.close()
        await slow.close()


async def test_what_one_call_is_told_to_wait_holds_for_all() -> None:
    async with model_server() as server:
        provider = openai(server.url)
        server.answers = [error_answer(429, "rate_limit_error", "slow down", retry_after="1")]
        with pytest.raises(ProviderError):
            await ask(provider)
        assert await many(server, provider, 2) >= 0.9
        await provider.close()


async def test_a_reply_that_takes_too_long_is_a_broken_stream() -> None:
    async with model_server() as server:
        provider = openai(server.url, total_timeout=0.2)
        server.answers = [Answer([*text_pieces("openai", ["so far"]), HANG])]
        with pytest.raises(ProviderError, match=r"longer than 0\.2 s") as late:
            await ask(provider)
        assert (late.value.kind, late.value.retryable) == ("provider_stream", True)
        while server.busy:
            await asyncio.sleep(0.01)
        await provider.close()


async def test_keys_go_where_the_endpoint_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with model_server() as server:
        for provider, header, value in [
            (openai(server.url), "authorization", None),
            (openai(server.url, api_key_env="MY_KEY"), "authorization", "Bearer secret"),
            (openai(server.url, api_key_env="MY_KEY", key_header="api-key"), "api-key", "secret"),
        ]:
            monkeypatch.setenv("MY_KEY", "secret")
            server.answers = [reply()]
            await ask(provider)
            assert server.headers[-1].get(header) == value
            await provider.close()
        claude = anthropic(server.url, api_key_env="MY_KEY", thinking_tokens=1024)
        server.answers = [Answer([*text_pieces("anthropic", ["ok"]), *end_pieces("anthropic")])]
        await ask(claude)
        assert server.headers[-1]["x-api-key"] == "secret"
        assert server.bodies[-1]["thinking"] == {"type": "enabled", "budget_tokens": 1024}
        assert server.bodies[-1]["max_tokens"] > 1024
        await claude.close()


def test_presets_name_address_key_and_quirks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_BASE_URL", "https://mine.openai.azure.com/openai/v1")
    for name, preset in PRESETS.items():
        provider: Any = provider_from_string(f"{name}:some-model")
        assert provider.model == "some-model"
        assert provider.api_key_env == preset.api_key_env
        monkeypatch.delenv(preset.api_key_env, raising=False)
        local = provider.base_url.startswith("http://127.0.0.1")
        if local:
            provider.preflight()
        else:
            with pytest.raises(PreflightError, match=preset.api_key_env):
                provider.preflight()
        agent = AgentConfig(name="a", provider=provider)
        again: Any = unpack(pack(agent)).llm
        assert again.settings() == provider.settings()
        assert pickle.loads(pickle.dumps(provider)).settings() == provider.settings()
    assert provider_from_string("azure:gpt").settings()["key_header"] == "api-key"  # type: ignore[attr-defined]  # ours
    monkeypatch.delenv("AZURE_OPENAI_BASE_URL")
    with pytest.raises(ConfigError, match="AZURE_OPENAI_BASE_URL"):
        provider_from_string("azure:gpt")
    monkeypatch.setenv("OLLAMA_BASE_URL", "http://10.0.0.5:11434/v1")
    assert provider_from_string("ollama:llama").base_url == "http://10.0.0.5:11434/v1"  # type: ignore[attr-defined]  # ours


@pytest.mark.parametrize(
    "options", [{"max_concurrent": 0}, {"requests_per_minute": 0}, {"total_timeout": -1}, {"base_url": "ftp://x"}]
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        OpenAICompatible("m", **{"base_url": "http://127.0.0.1:1", **options})


async def test_a_lone_surrogate_does_not_break_a_request() -> None:
    async with model_server() as server:
        provider = openai(server.url)
        server.answers = [reply()]
        request = ModelRequest("s", 0, "system \ud800", (Message.user("text \udfff"),))
        assert [d async for d in provider.stream(request, CancelToken())]
        assert server.bodies[-1]["messages"][1]["content"] == "text ?"
        await provider.close()
