"""The Anthropic dialect: every field case at every chunk size, recorded answers of a real server, the request side."""

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
    RedactedThinkingBlock,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallBlock,
    ToolCallDelta,
)
from greenroom.providers import decode_anthropic, encode_anthropic, encode_openai
from greenroom.runtime.calls import ToolSchema
from greenroom.runtime.messages import ToolResultBlock
from greenroom.runtime.providers.anthropic_codec import anthropic_text
from greenroom.runtime.providers.openai_codec import openai_text


async def decode(body: bytes, size: int | None = None) -> tuple[list[Any], ProviderError | None]:
    """The deltas that went out, and the error that ended them."""
    deltas: list[Any] = []
    try:
        async for delta in decode_anthropic(chunks(body, size)):
            deltas.append(delta)
    except ProviderError as error:
        return deltas, error
    return deltas, None


async def whole(body: bytes, size: int | None = None) -> Message:
    deltas, error = await decode(body, size)
    assert error is None
    assert [type(delta) for delta in deltas].count(MessageDelta) == 1
    message = deltas[-1].message
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == message.text
    return message  # type: ignore[no-any-return]  # of a MessageDelta


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def grow(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stop(reason: str = "end_turn", **usage: Any) -> list[dict[str, Any]]:
    return [{"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}, {"type": "message_stop"}]


BODIES = sorted(path for path in CASES.glob("C*anthropic*.sse"))
REPLAYED = {
    ThinkingBlock: lambda b: {"type": "thinking", "thinking": b.text, "signature": b.signature},
    RedactedThinkingBlock: lambda b: {"type": "redacted_thinking", "data": b.data},
    TextBlock: lambda b: {"type": "text", "text": b.text},
    ToolCallBlock: lambda b: {"type": "tool_use", "id": b.id, "name": b.name, "input": b.arguments},
}


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
async def test_field_cases(path: Path) -> None:
    for size in SIZES:
        await check_case(path, size)


async def check_case(path: Path, size: int | None) -> None:
    want = json.loads(path.with_name(path.stem + ".expected.json").read_text())
    deltas, error = await decode(path.read_bytes(), size)
    said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    if "raises" in want:
        assert error is not None
        assert error.status == want["status_equiv"]
        assert error.retryable is want.get("retryable", True)
        assert said == want["text_before"]
        assert error.emitted is want.get("partial_output", False)
        return
    assert error is None
    message = deltas[-1].message
    if "text" in want:
        assert message.text == said == want["text"]
    if "tool_calls" in want:
        made = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        assert made == want["tool_calls"]
    if "stop" in want:
        assert message.stop == want["stop"]
    if "usage" in want:
        assert (message.usage.input_tokens, message.usage.output_tokens) == (want["usage"]["in"], want["usage"]["out"])
    if "assistant_blocks_for_replay" in want:
        again = Message.model_validate_json(message.encoded)
        assert [REPLAYED[type(block)](block) for block in again.content] == want["assistant_blocks_for_replay"]
        sent = encode_anthropic(request(Message.user("hi"), again))["messages"][1]
        assert sent["content"] == want["assistant_blocks_for_replay"]
    match want.get("outcome"):
        case "max_tokens":
            assert message.stop == "max_tokens"
            assert message.stop_kind == "length"
            assert message.tool_calls[0].arguments is None
        case "refusal":
            assert (message.stop_kind, message.content) == ("refusal", ())
        case "truncated":
            assert message.stop_kind == "context_window"


@pytest.mark.parametrize("path", sorted(WIRE.glob("anthropic-*.resp.http")), ids=lambda path: path.stem)
async def test_recorded_answers_of_a_real_server(path: Path) -> None:
    for size in SIZES:
        await check_recorded(path, size)


async def check_recorded(path: Path, size: int | None) -> None:
    _, _, body = path.read_bytes().partition(b"\r\n\r\n")
    message = await whole(body, size)
    assert message.stop_kind in ("end", "tool_calls", "length")
    assert message.usage is not None
    assert message.usage.output_tokens > 0
    for made in message.tool_calls:
        assert made.arguments is not None
        assert "command" in made.arguments


@pytest.mark.parametrize("path", sorted(WIRE.glob("err-*.resp.http")), ids=lambda path: path.stem)
async def test_an_error_body_of_either_shape_is_an_error(path: Path) -> None:
    _, _, body = path.read_bytes().partition(b"\r\n\r\n")
    _, error = await decode(body)
    assert error is not None
    assert error.status in (400, 500)


async def test_a_signed_block_without_text_is_kept_and_an_unsigned_one_is_not_sent() -> None:
    body = sse(
        start(0, type="thinking", thinking="", signature=""),
        grow(0, type="signature_delta", signature="c2ln"),
        start(1, type="thinking", thinking="unsigned"),
        start(2, type="text", text="ok"),
        *stop(),
    )
    message = await whole(body)
    signed, unsigned = ThinkingBlock(text="", signature="c2ln"), ThinkingBlock(text="unsigned", signature=None)
    assert message.content == (signed, unsigned, TextBlock(text="ok"))
    sent = encode_anthropic(request(Message.user("hi"), message, Message.user("go on")))["messages"][1]["content"]
    assert sent == [{"type": "thinking", "thinking": "", "signature": "c2ln"}, {"type": "text", "text": "ok"}]


async def test_whole_inputs_missing_ids_and_equal_ids() -> None:
    body = sse(
        start(0, type="tool_use", id="a", name="one", input={"x": 1}),
        start(1, type="tool_use", name="two"),
        start(2, type="tool_use", id="a", name="three", input={}),
        grow(2, type="input_json_delta", partial_json='{"y":"ü"}'),
        start(3, type="server_tool_use", id="s", name="web"),
        grow(3, type="input_json_delta", partial_json="{}"),
        grow(9, type="text_delta", text="of no block"),
        *stop("tool_use"),
    )
    message = await whole(body)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("one", {"x": 1}),
        ("two", {}),
        ("three", {"y": "ü"}),
    ]
    assert len({call.id for call in message.tool_calls}) == 3
    assert message.text == ""


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("end_turn", "end"), ("stop_sequence", "end"), ("pause_turn", "pause"), ("something_new", "other")],
)
async def test_stop_reasons(reason: str, kind: str) -> None:
    message = await whole(sse(start(0, type="text", text="x"), *stop(reason)))
    assert (message.stop, message.stop_kind) == (reason, kind)


async def test_the_last_report_of_usage_wins_and_what_it_leaves_out_stays() -> None:
    first = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
    first["message"]["usage"]["cache_read_input_tokens"] = 5  # type: ignore[index]  # built just above
    message = await whole(sse(first, start(0, type="text", text="x"), *stop(output_tokens=9, input_tokens=None)))
    assert message.usage is not None
    assert message.usage.model_dump() == {"input_tokens": 7, "output_tokens": 9, "cached_tokens": 5}


@pytest.mark.parametrize("body", [b"", sse(start(0, type="text", text="x")), sse({"type": "ping"})])
async def test_an_end_before_the_end_is_a_broken_stream(body: bytes) -> None:
    deltas, error = await decode(body)
    assert error is not None
    assert (error.kind, error.retryable, error.emitted) == ("provider_stream", True, bool(deltas))


async def test_an_error_that_asks_for_something_else_is_not_tried_again() -> None:
    _, error = await decode(sse({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}))
    assert error is not None
    assert (error.retryable, error.status, error.code) == (False, 400, "invalid_request_error")


async def test_deltas_say_what_they_belong_to() -> None:
    body = sse(
        start(0, type="thinking", thinking=""),
        grow(0, type="thinking_delta", thinking="hm"),
        start(1, type="tool_use", id="a", name="t", input={}),
        grow(1, type="input_json_delta", partial_json="{}"),
        *stop("tool_use"),
    )
    deltas, _ = await decode(body)
    assert deltas[:-1] == [ThinkingDelta("hm"), ToolCallDelta(0, "a", "t"), ToolCallDelta(0, "a", "t", "{}")]


# -- the request


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(session_id="s", call_no=0, system=fields.pop("system", None), messages=messages, **fields)


def of_wire(message: dict[str, Any]) -> Message:
    """A message of the wire as one of ours."""
    blocks: list[Any] = []
    for block in message["content"]:
        match block["type"]:
            case "text":
                blocks.append(TextBlock(text=block["text"]))
            case "tool_use":
                blocks.append(ToolCallBlock(id=block["id"], name=block["name"], arguments=block["input"]))
            case "tool_result":
                content = (TextBlock(text=block["content"]),)
                blocks.append(ToolResultBlock(call_id=block["tool_use_id"], content=content))
    results = any(isinstance(block, ToolResultBlock) for block in blocks)
    return Message(role="tool" if results else message["role"], content=tuple(blocks))


@pytest.mark.parametrize(
    "case", json.loads((CASES / "C16_anthropic_request_shape.json").read_text())["in"], ids=lambda case: case["name"]
)
def test_histories_are_what_the_protocol_takes(case: dict[str, Any]) -> None:
    turns = encode_anthropic(request(*map(of_wire, case["messages"])))["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"][: len(turns)]
    for before, turn in zip([None, *turns], turns, strict=False):
        assert turn["content"]
        types = [block["type"] for block in turn["content"]]
        assert all(block["text"].strip() for block in turn["content"] if block["type"] == "text")
        if turn["role"] == "user" and before is not None:
            asked = [block["id"] for block in before["content"] if block["type"] == "tool_use"]
            answered = [block["tool_use_id"] for block in turn["content"] if block["type"] == "tool_result"]
            assert answered == asked
            assert types == sorted(types, key=lambda kind: kind != "tool_result")
    last = turns[-1]["content"][-1]
    assert turns[-1]["role"] == "user" or last["text"] == last["text"].rstrip()
    texts = [block["text"] for turn in turns for block in turn["content"] if block["type"] == "text"]
    wanted = [b["text"] for m in case["messages"] for b in m["content"] if b["type"] == "text" and b["text"].strip()]
    assert [text.strip() for text in texts] == [text.strip() for text in wanted], "nothing is lost"


def test_options_images_errors_and_other_dialects_blocks() -> None:
    picture = ImageBlock(source={"media_type": "image/png", "data": "QUJD"})
    linked = ImageBlock(source={"url": "https://x/y.png"})
    call = ToolCallBlock(id="a", name="t", arguments=None, raw_arguments="{cut")
    shown = ToolResultBlock(call_id="a", content=(TextBlock(text="see"), picture), is_error=True)
    history = (
        Message(role="user", content=(TextBlock(text="look"), picture, linked)),
        Message(role="assistant", content=(ReasoningBlock(text="not ours"), call)),
        Message(role="tool", content=(shown,)),
    )
    body = encode_anthropic(request(*history, system="be brief", tools=(ToolSchema("t", "d", {"type": "object"}),)))
    assert body["system"] == "be brief"
    assert body["max_tokens"] == 4096
    assert body["tools"] == [{"name": "t", "description": "d", "input_schema": {"type": "object"}}]
    assert "temperature" not in body
    said, asked, answered = body["messages"]
    assert said["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    assert said["content"][2]["source"] == {"type": "url", "url": "https://x/y.png"}
    assert asked["content"] == [{"type": "tool_use", "id": "a", "name": "t", "input": {"_raw": "{cut"}}]
    assert answered["content"][0]["is_error"] is True
    assert [part["type"] for part in answered["content"][0]["content"]] == ["text", "image"]
    assert encode_anthropic(request(*history, temperature=0.0, max_tokens=9))["max_tokens"] == 9


def test_system_messages_go_where_the_protocol_has_them() -> None:
    late = Message(role="system", content=(TextBlock(text="and polite"),))
    body = encode_anthropic(request(Message.user("hi"), late, Message.user("there"), system="be brief"))
    assert body["system"] == "be brief\n\nand polite"
    assert [turn["role"] for turn in body["messages"]] == ["user"]
    assert "system" not in encode_anthropic(request(Message.user("hi"), system="  "))


def test_ids_on_the_wire_are_plain_short_and_used_once() -> None:
    def turn(id: str) -> tuple[Message, Message]:
        call = ToolCallBlock(id=id, name="t", arguments={})
        result = ToolResultBlock(call_id=id, content=(TextBlock(text=f"of {id}"),))
        return Message(role="assistant", content=(call,)), Message(role="tool", content=(result,))

    odd = ["call:1", "call_1", "call_1", "x" * 80, "x" * 80]
    history = [Message.user("go")]
    for id in odd:
        history += turn(id)
    turns = encode_anthropic(request(*history))["messages"]
    asked = [block["id"] for made in turns for block in made["content"] if block["type"] == "tool_use"]
    answered = [block["tool_use_id"] for made in turns for block in made["content"] if block["type"] == "tool_result"]
    assert asked == answered
    assert len(set(asked)) == len(odd)
    assert all(len(id) <= 40 and id.replace("_", "").replace("-", "").isalnum() for id in asked)
    sent = encode_openai(request(*history))["messages"]
    assert [made["tool_call_id"] for made in sent if made["role"] == "tool"] == asked


def turns_of(*roles: str) -> list[Message]:
    """A history of these roles in turn: u user, a assistant, c assistant with a call, t its result."""
    made: list[Message] = []
    for number, role in enumerate(roles):
        call = ToolCallBlock(id=f"c{number if role == 'c' else number - 1}", name="t", arguments={"n": "ü\u2028"})
        made.append(
            {
                "u": Message.user(f"user {number}"),
                "b": Message.user("  "),
                "a": Message(role="assistant", content=(TextBlock(text=f"said {number} "),)),
                "c": Message(role="assistant", content=(TextBlock(text="calling"), call)),
                "t": Message(role="tool", content=(ToolResultBlock(call_id=call.id, content=(TextBlock(text="r"),)),)),
            }[role]
        )
    return made


@pytest.mark.parametrize(
    "roles", ["u", "uu", "ua", "uct", "uctctcta", "uctu", "uuctuuctau", "ubctbu", "uauct", "uctt", "a", "auct", "uaau"]
)
def test_the_text_that_is_sent_is_what_the_encoder_says(roles: str) -> None:
    """Made of parts that are kept, it is the same: twice, and after the history has grown."""
    history: list[Message] = []
    for message in turns_of(*roles):
        history.append(message)
        asked = request(*history, system="s", temperature=0.5, tools=(ToolSchema("t", "d", {"type": "object"}),))
        for _ in range(2):
            sent = json.loads(anthropic_text(asked, model="m", stream=True))
            assert sent == {**encode_anthropic(asked), "model": "m", "stream": True}
            sent = json.loads(openai_text(asked, reasoning=True, strict=False, model="m"))
            assert sent == {**encode_openai(asked), "model": "m"}


async def test_an_event_that_says_nothing_is_passed_over_and_an_error_in_any_shape_is_one() -> None:
    text = [start(0, type="text", text=""), grow(0, type="text_delta", text="a")]
    quiet = b'data: {}\n\ndata: {"error": null}\n\ndata: {"type": "news", "error": "of no matter"}\n\n'
    assert (await whole(quiet + sse(*text, *stop()))).text == "a"
    for event in (b'{"error": {"message": "m"}}', b'{"type": "error"}'):
        deltas, error = await decode(b"data: " + event + b"\n\n")
        assert (deltas, type(error)) == ([], ProviderError)


async def test_a_reply_that_came_whole_is_the_same_message() -> None:
    content = [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"x": "ä"}}]
    usage = {"input_tokens": 3, "output_tokens": 2}
    document = {"type": "message", "content": content, "stop_reason": "tool_use", "usage": usage}
    message = await whole(json.dumps(document).encode())
    assert (message.text, message.stop_kind) == ("hi", "tool_calls")
    assert [(call.id, call.arguments, call.raw_arguments) for call in message.tool_calls] == [
        ("t", {"x": "ä"}, '{"x": "ä"}')
    ]
    assert message.usage is not None
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 2)


def test_results_come_first_and_in_the_order_of_their_calls_whatever_lies_between() -> None:
    asked = Message(
        role="assistant",
        content=(TextBlock(text="so"), *(ToolCallBlock(id=id, name="f", arguments={}) for id in ("a", "b"))),
    )
    answered = [
        Message(role="tool", content=(ToolResultBlock(call_id=id, content=(TextBlock(text=id),)),)) for id in ("b", "a")
    ]
    for between in ((), (Message.user("by the way"),)):
        history = (Message.user("go"), asked, answered[0], *between, answered[1])
        for turns in (
            encode_anthropic(request(*history))["messages"],
            json.loads(anthropic_text(request(*history)))["messages"],
        ):
            assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
            kinds = [(block["type"], block.get("tool_use_id")) for block in turns[2]["content"]]
            assert kinds == [("tool_result", "a"), ("tool_result", "b"), *[("text", None)] * len(between)]


async def test_blocks_are_found_by_their_number_however_large() -> None:
    body = sse(start(1000, type="text", text=""), grow(1000, type="text_delta", text="a"), *stop())
    assert (await whole(body)).text == "a"


def test_a_last_turn_of_the_assistant_ends_in_no_white_space_and_only_its_end_is_touched() -> None:
    def last(*blocks: Any) -> list[dict[str, Any]]:
        message = Message(role="assistant", content=blocks)
        content = encode_anthropic(request(Message.user("go"), message))["messages"][-1]["content"]
        assert isinstance(content, list)
        return content

    assert [block["text"] for block in last(TextBlock(text="a \n"), TextBlock(text="b \n"))] == ["a \n", "b"]
    assert last(TextBlock(text="a "), RedactedThinkingBlock(data="x "))[0]["text"] == "a "
    assert last(RedactedThinkingBlock(data="x "))[-1] == {"type": "redacted_thinking", "data": "x "}
