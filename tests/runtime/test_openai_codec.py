"""The OpenAI dialect: every field case at every chunk size, recorded answers of a real server, and the request side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scenes import CASES, SIZES, WIRE, chunks

from greenroom import (
    ImageBlock,
    Message,
    MessageDelta,
    ModelRequest,
    ProviderError,
    ReasoningBlock,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallBlock,
    ToolCallDelta,
)
from greenroom.providers import decode_openai, encode_openai
from greenroom.runtime.calls import ToolSchema
from greenroom.runtime.messages import ToolResultBlock


async def decode(body: bytes, size: int | None = None) -> list[Any]:
    return [delta async for delta in decode_openai(chunks(body, size))]


def whole(deltas: list[Any]) -> Message:
    assert [type(delta) for delta in deltas].count(MessageDelta) == 1
    assert isinstance(deltas[-1], MessageDelta)
    return deltas[-1].message


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def case_bodies() -> list[Path]:
    bodies = (path for path in CASES.glob("C*") if path.suffix in (".sse", ".json") and _expected(path).exists())
    return sorted(path for path in bodies if "anthropic" not in path.stem)


def _expected(path: Path) -> Path:
    return path.with_name(path.stem + ".expected.json")


@pytest.mark.parametrize("path", case_bodies(), ids=lambda path: path.stem)
async def test_field_cases(path: Path) -> None:
    for size in SIZES:
        await check_case(path, size)


async def check_case(path: Path, size: int | None) -> None:
    want = json.loads(_expected(path).read_text())
    body = path.read_bytes()
    if "raises" in want or want.get("outcome") == "error":
        with pytest.raises(ProviderError) as caught:
            await decode(body, size)
        assert caught.value.retryable is want.get("retryable", True)
        assert want.get("message_contains", "") in str(caught.value)
        return
    deltas = await decode(body, size)
    message = whole(deltas)
    if "text" in want:
        assert message.text == want["text"]
        assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == want["text"]
    if "tool_calls" in want:
        made = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        wanted = want["tool_calls"]
        assert [
            {key: value for key, value in m.items() if key in w} for m, w in zip(made, wanted, strict=True)
        ] == wanted
        assert len({m["id"] for m in made} - {""}) == len(made)
    if "stop" in want:
        assert message.stop == want["stop"]
    if "usage" in want:
        assert message.usage is not None
        assert (message.usage.input_tokens, message.usage.output_tokens) == (want["usage"]["in"], want["usage"]["out"])
    if want.get("outcome") == "length":
        assert message.stop_kind == "length"
        assert message.tool_calls[0].arguments is None


@pytest.mark.parametrize("path", sorted(WIRE.glob("openai-*.resp.http")), ids=lambda path: path.stem)
async def test_recorded_answers_of_a_real_server(path: Path) -> None:
    for size in SIZES:
        await check_recorded(path, size)


async def check_recorded(path: Path, size: int | None) -> None:
    head, _, body = path.read_bytes().partition(b"\r\n\r\n")
    assert b"200 OK" in head
    message = whole(await decode(body, size))
    assert message.stop_kind in ("end", "tool_calls", "length")
    assert bool(message.tool_calls) == (message.stop == "tool_calls")
    for made in message.tool_calls:
        assert made.arguments is not None
        assert "command" in made.arguments
    if b'"usage":' in body:
        assert message.usage is not None
        assert message.usage.output_tokens > 0


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
async def test_all_line_ends_and_a_last_event_without_one(end: bytes) -> None:
    body = sse(chunk({"content": "a"}), chunk({"content": "b"}, "stop")).replace(b"\n", end) + b"data:[DONE]"
    for size in SIZES:
        assert whole(await decode(body, size)).text == "ab"


async def test_an_error_after_text_says_that_text_went_out() -> None:
    body = sse(chunk({"content": "half"}), {"error": {"message": "lost", "type": "server_error"}})
    with pytest.raises(ProviderError) as caught:
        await decode(body)
    assert (caught.value.emitted, caught.value.retryable, caught.value.status) == (True, True, 500)
    with pytest.raises(ProviderError, match="just a text"):
        await decode(sse({"error": "just a text"}))


async def test_usage_in_every_chunk_counts_once_and_missing_choices_are_no_error() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    body = sse(
        chunk({"content": "x"}, usage={"prompt_tokens": 5, "completion_tokens": 1}),
        {"choices": None, "usage": usage},
        {"usage": usage},
        chunk(None, "stop"),
    )
    message = whole(await decode(body))
    assert message.usage is not None
    assert (message.usage.output_tokens, message.usage.cached_tokens) == (2, 4)


async def test_calls_with_odd_indices_ids_that_change_and_arguments_as_objects() -> None:
    def piece(index: int | None, id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"function": {"name": name, "arguments": arguments}}
        return made | ({"id": id} if id is not None else {}) | ({"index": index} if index is not None else {})

    body = sse(
        chunk({"tool_calls": [piece(1, "a", "one", {"p": 1}), piece(3, "b", "two", "")]}),
        chunk({"tool_calls": [piece(3, "changed", None, '{"q":'), piece(3, None, "two", "2}")]}),
        chunk({}, "tool_calls"),
    )
    deltas = await decode(body)
    made = [(c.id, c.name, c.arguments) for c in whole(deltas).tool_calls]
    assert made == [("a", "one", {"p": 1}), ("b", "two", {"q": 2})]
    assert {delta.index for delta in deltas if isinstance(delta, ToolCallDelta)} == {0, 1}


async def test_reasoning_is_kept_and_a_refusal_is_told_apart() -> None:
    message = whole(await decode(sse(chunk({"reasoning_content": "hm"}), chunk({"content": "so"}, "stop"))))
    assert message.content == (ReasoningBlock(text="hm"), TextBlock(text="so"))
    assert whole(await decode(sse(chunk({"refusal": "no"}, "stop")))).stop_kind == "refusal"


async def test_no_json_in_the_stream_is_a_broken_stream() -> None:
    with pytest.raises(ProviderError) as caught:
        await decode(sse(chunk({"content": "x"}), b"{broken"))
    assert (caught.value.kind, caught.value.retryable) == ("provider_stream", True)


# -- the request


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(session_id="s", call_no=0, system=None, messages=messages, **fields)


def test_unset_options_are_left_out_and_set_ones_go_through() -> None:
    assert set(encode_openai(request(Message.user("hi")))) == {"messages"}
    body = encode_openai(request(Message.user("hi"), temperature=0.0, max_tokens=5, tools=(ToolSchema("t", "d", {}),)))
    assert (body["temperature"], body["max_tokens"]) == (0.0, 5)
    assert body["tools"][0]["function"]["name"] == "t"


@pytest.mark.parametrize(
    "raw", json.loads((CASES / "C14_bad_arguments_in_history.json").read_text())["variants_of_arguments"]
)
async def test_bad_arguments_never_go_back_on_the_wire(raw: str) -> None:
    body = sse(
        chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "bash", "arguments": raw}}]}, "tool_calls")
    )
    message = whole(await decode(body))
    encoded = encode_openai(request(Message.user("hi"), message))["messages"][1]
    arguments = json.loads(encoded["tool_calls"][0]["function"]["arguments"])
    assert isinstance(arguments, dict)
    assert message.tool_calls[0].arguments == ({} if raw == "" else None)


def test_histories_are_what_templates_take() -> None:
    thought = ReasoningBlock(text="think 1")
    asks = Message(role="assistant", content=(thought, ToolCallBlock(id="a", name="t", arguments={"x": "ü"})))
    answers = Message(role="tool", content=(ToolResultBlock(call_id="a", content=(TextBlock(text="r"),)),))
    said = Message(role="assistant", content=(ReasoningBlock(text="think 2"), TextBlock(text="done  \n")))
    empty = Message(role="assistant", content=(TextBlock(text="  "),))
    history = (Message.user("one"), Message.user("two"), asks, answers, said, empty, Message.user("three"))
    encoded = encode_openai(request(*history))["messages"]
    assert [message["role"] for message in encoded] == ["user", "assistant", "tool", "assistant", "user"]
    assert encoded[0]["content"] == "one\n\ntwo"
    assert encoded[1]["reasoning_content"] == "think 1"
    assert encoded[1]["content"] is None
    assert encoded[2] == {"role": "tool", "tool_call_id": "a", "content": "r"}
    assert encoded[3] == {"role": "assistant", "content": "done"}
    assert "reasoning_content" not in encode_openai(request(*history), reasoning=False)["messages"][1]


async def test_nothing_counts_after_the_end_and_the_first_choice_wherever_it_stands() -> None:
    late = whole(await decode(sse(chunk({"content": "a"}, "stop"), b"[DONE]", chunk({"content": "late"}))))
    assert late.text == "a"
    other, ours = ({"index": number, "delta": {"content": text}} for number, text in ((1, "other"), (0, "ours")))
    both = whole(await decode(sse({"choices": [other, ours]}, chunk(None, "stop"))))
    assert both.text == "ours"


async def test_a_body_without_any_event_is_told_from_one_that_was_cut() -> None:
    for body, said in ((b"", "before any event"), (sse(chunk({"content": "a"})), "before the reply was finished")):
        with pytest.raises(ProviderError, match=said):
            await decode(body)


async def test_a_new_call_at_the_same_index_is_new_whichever_id_is_smaller() -> None:
    def piece(id: str, **function: str) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": 0, "id": id, "function": function}]})

    for first, second in (("a", "b"), ("b", "a")):
        pieces = (piece(first, name="f", arguments="{}"), piece(second, name="g", arguments="{}"))
        message = whole(await decode(sse(*pieces, chunk(None, "tool_calls"))))
        assert [(call.id, call.name) for call in message.tool_calls] == [(first, "f"), (second, "g")]
    same = "".join(["a", "bc"])  # equal, and another object: as it comes from another chunk
    pieces = (piece("abc", name="f", arguments='{"x":'), piece(same, arguments="1}"))
    (call,) = whole(await decode(sse(*pieces, chunk(None, "tool_calls")))).tool_calls
    assert call.arguments == {"x": 1}
    named = {"tool_calls": [{"id": "abc", "function": {"name": "f", "arguments": "{"}}]}
    bare = {"tool_calls": [{"id": same, "function": {"arguments": "}"}}]}
    (call,) = whole(await decode(sse(chunk(named), chunk(bare), chunk(None, "tool_calls")))).tool_calls
    assert (call.id, call.name, call.arguments) == ("abc", "f", {})


@pytest.mark.parametrize(
    ("stop", "calls", "kind"),
    [
        (None, False, "end"),
        (None, True, "tool_calls"),
        ("stop", False, "end"),
        ("stop", True, "tool_calls"),
        ("made_up", False, "other"),
        ("made_up", True, "tool_calls"),
        ("length", True, "length"),
    ],
)
async def test_a_stop_means_what_the_reply_holds(stop: str | None, kind: str, calls: bool) -> None:
    asked = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    message = whole(await decode(sse(chunk(asked if calls else {"content": "x"}), chunk(None, stop), b"[DONE]")))
    assert (message.stop, message.stop_kind) == (stop, kind)


async def test_content_in_parts_is_its_text_whatever_else_is_in_it() -> None:
    parts = [{"type": "image_url"}, "loose", {"text": 3}, None, {"type": "text", "text": "kept"}]
    assert whole(await decode(sse(chunk({"content": parts}), chunk({"content": 7}, "stop")))).text == "kept"


def test_images_go_out_and_other_dialects_blocks_do_not() -> None:
    blocks = (
        TextBlock(text="look"),
        ImageBlock(source={"media_type": "image/png", "data": "QUJD"}),
        ImageBlock(source={"url": "https://example.org/a.png"}),
        ThinkingBlock(text="hm", signature="s"),
    )
    (message,) = encode_openai(request(Message(role="user", content=blocks)))["messages"]
    assert message["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]


def test_only_neighbours_of_one_role_are_merged() -> None:
    system = Message(role="system", content=(TextBlock(text="rule"),))
    history = (Message.user("a"), Message.user("b"), system, Message.user("c"))
    encoded = encode_openai(request(*history))["messages"]
    assert [(turn["role"], turn["content"]) for turn in encoded] == [
        ("user", "a\n\nb"),
        ("system", "rule"),
        ("user", "c"),
    ]


@pytest.mark.parametrize("index", [{"index": 0}, {}], ids=["index", "no index"])
async def test_a_server_may_say_id_and_name_again_with_every_piece(index: dict[str, int]) -> None:
    id, name = "call-" + "1" * 80, "look" + "up" * 40  # long: no decoder of JSON gives the same object twice
    pieces = [
        chunk({"tool_calls": [{**index, "id": id, "function": {"name": name, "arguments": part}}]})
        for part in ('{"city":', '"Oslo"}')
    ]
    (block,) = whole(await decode(sse(*pieces, chunk(finish="tool_calls"), b"[DONE]"))).tool_calls
    assert (block.id, block.name, block.arguments) == (id, name, {"city": "Oslo"})


async def test_reasoning_goes_out_piece_by_piece() -> None:
    pieces = [chunk({"reasoning_content": text}) for text in ("first ", "then")]
    deltas = await decode(sse(*pieces, chunk({"content": "so"}, finish="stop"), b"[DONE]"))
    assert [delta.text for delta in deltas if isinstance(delta, ThinkingDelta)] == ["first ", "then"]
