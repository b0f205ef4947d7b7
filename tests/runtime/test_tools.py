"""Registry, schemas, argument repair and outputs: what a model is offered and what reaches a function."""

from __future__ import annotations

import datetime
import decimal
import json
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model
from scenes import CASES, default_registry

from greenroom import ConfigError, ExecResult, Interrupt, ToolContext, ToolOutput, ToolRegistry, ToolSpec
from greenroom.runtime.tools.builtin import default_tools, exec_output
from greenroom.runtime.tools.output import NotPlain, to_output
from greenroom.runtime.tools.schema import BadArguments, json_schema, parse_object, validate


class Node(BaseModel):
    value: str
    children: list[Node] | None = None


class Left(BaseModel):
    right: Right | None = None


class Right(BaseModel):
    left: Left | None = None


class Row(BaseModel):
    path: str
    limit: int = 10
    items: list[str] = []
    tag: str | None = None
    body: str = ""


def test_a_new_registry_is_empty_and_the_default_tools_are_named() -> None:
    assert len(ToolRegistry()) == 0
    assert default_registry().names() == [
        "read_file",
        "write_file",
        "bash",
        "check",
        "kill",
        "askFollowupQuestion",
    ]
    with pytest.raises(ConfigError):
        default_tools("all")  # type: ignore[arg-type]  # the mistake is the point


def test_a_subset_keeps_the_tools_and_an_unknown_name_is_named() -> None:
    registry = default_registry()
    subset = registry.subset(["bash"])
    assert subset.names() == ["bash"]
    assert subset.get("bash") is registry.get("bash")
    assert len(registry) == 6
    assert "bash" in registry
    assert not registry.contains("nope")
    with pytest.raises(KeyError, match="nope"):
        registry.subset(["bash", "nope"])
    with pytest.raises(ConfigError, match="already"):
        registry.add_tool(next(iter(registry)))


def test_a_signature_becomes_a_schema() -> None:
    registry = ToolRegistry()

    @registry.tool(effect="read_only", timeout=30)
    async def lookup(
        ctx: ToolContext,
        city: Annotated[str, Field(description="Where")],
        days: int = 1,
        unit: Literal["c", "f"] = "c",
    ) -> dict[str, Any]:
        """Looks the weather up."""
        return {}

    tool = registry.get("lookup")
    assert tool is not None
    assert tool.spec.timeout == 30
    assert tool.schema.description == "Looks the weather up."
    assert tool.schema.parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer", "default": 1},
            "unit": {"enum": ["c", "f"], "type": "string", "default": "c"},
        },
        "required": ["city"],
    }


GOOGLE = """Looks the weather up.

Args:
    city: Where,
        in any spelling.
    days: How many.
"""
SPHINX = """Looks the weather up.

:param city: Where, in any spelling.
:param days: How many.
"""
NUMPY = """Looks the weather up.

Parameters
----------
city : str
    Where, in any spelling.
days : int
    How many.
"""


@pytest.mark.parametrize("doc", [GOOGLE, SPHINX, NUMPY], ids=["google", "sphinx", "numpy"])
def test_what_a_docstring_says_of_parameters_goes_to_them(doc: str) -> None:
    def lookup(city: str, days: Annotated[int, Field(description="its own word")] = 1) -> str:
        return city

    lookup.__doc__ = doc
    registry = ToolRegistry()
    registry.tool(lookup)
    (tool,) = registry
    assert tool.schema.description == "Looks the weather up."
    assert tool.schema.parameters["properties"] == {
        "city": {"type": "string", "description": "Where, in any spelling."},
        "days": {"type": "integer", "default": 1, "description": "its own word"},
    }
    assert tool.schema.parameters["required"] == ["city"]


def test_what_a_docstring_says_besides_is_not_lost() -> None:
    def lookup(city: str, days: int = Field(3, ge=1)) -> str:
        """Looks the weather up.

        Args:
            city: Where.
            days: How many.

        Returns:
            What it is like. Never call it twice for the same city.
        """
        return city

    registry = ToolRegistry()
    registry.tool(lookup)
    (tool,) = registry
    assert tool.schema.description.endswith("Never call it twice for the same city.")
    assert tool.schema.parameters["properties"]["days"] == {
        "type": "integer",
        "default": 3,
        "minimum": 1,
        "description": "How many.",
    }


class Colour(StrEnum):
    red = "red"
    blue = "blue"


class Place(BaseModel):
    """Where it stands."""

    x: int
    y: int = Field(default=0, ge=0)


class Draw(BaseModel):
    """Draws a shape."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    place: Place
    """Its corner."""
    colour: Colour = Colour.red
    label: str | None = None
    points: list[Place] = []


async def draw(ctx: ToolContext, arguments: Draw) -> str:
    return ""


def test_a_model_with_everything_in_it_becomes_a_schema() -> None:
    registry = ToolRegistry()
    registry.add(ToolSpec("draw", "Draws.", Draw), draw)
    (tool,) = registry
    assert tool.schema.parameters == {
        "description": "Draws a shape.",
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place", "description": "Its corner."},
            "colour": {"$ref": "#/$defs/Colour", "default": "red"},
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "points": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "default": []},
        },
        "required": ["place"],
        "$defs": {
            "Place": {
                "description": "Where it stands.",
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0, "minimum": 0}},
                "required": ["x"],
            },
            "Colour": {"type": "string", "enum": ["red", "blue"]},
        },
    }


@pytest.mark.parametrize("model", [Node, Left], ids=lambda m: m.__name__)
def test_recursive_models_end_and_have_an_object_at_the_root(model: type[BaseModel]) -> None:
    for schema in (json_schema(model), json_schema(create_model("args", root=(model, ...)))):
        assert schema["type"] == "object"
        assert "$ref" not in schema
        assert "$defs" in schema
        json.dumps(schema)


def test_tools_that_cannot_be_offered_are_refused_by_name() -> None:
    registry = ToolRegistry()

    def untyped(city) -> str:  # type: ignore[no-untyped-def]  # the mistake is the point
        return ""

    def variadic(*cities: str) -> str:
        return ""

    def unknown(city: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821  # as above
        return ""

    broken: list[Callable[..., Any]] = [untyped, variadic, unknown]
    for function in broken:
        with pytest.raises(ConfigError, match=function.__name__):
            registry.tool(function)
    with pytest.raises(ConfigError, match="effect"):
        registry.tool(lambda: "", effect="harmless", name="x")  # type: ignore[call-overload]  # as above


@pytest.mark.parametrize("row", json.loads((CASES / "C22_argument_coercion.json").read_text())["rows"], ids=str)
def test_arguments_are_repaired_only_where_that_is_right(row: list[Any]) -> None:
    arguments, want = row
    if want.startswith("error"):
        with pytest.raises(BadArguments) as problem:
            validate(Row, arguments)
        for name in ("path", "items", "zz", "limit"):
            if name in arguments and name in want:
                assert name in str(problem.value)
        return
    made = validate(Row, arguments)
    assert isinstance(made, Row)
    if "limit" in arguments:
        assert made.limit == 10
    if "items" in arguments:
        assert made.items == ["a", "b"]
    if "body" in arguments:
        assert made.body == arguments["body"]
    if "tag" in arguments:
        assert made.tag == "null"


def test_an_error_names_field_expectation_and_what_came() -> None:
    with pytest.raises(BadArguments) as problem:
        validate(Row, {"path": 5, "zz": 1})
    assert str(problem.value) == (
        "unknown argument 'zz' (allowed: path, limit, items, tag, body); path: Input should be a valid string (got 5)"
    )


def test_a_model_that_allows_more_gets_more() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        a: int

    assert validate(Open, {"a": 1, "b": 2}).model_dump() == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("", {}), ('{"a": 1}', {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1}), ("null", None), ("[1]", None), ("{", None)],
)
def test_the_object_in_a_text(text: str, value: Any) -> None:
    assert parse_object(text) == value
    assert parse_object("[" * 100_000) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"b": 1, "a": [True, None]}, '{"b":1,"a":[true,null]}'),
        (datetime.date(2026, 11, 30), '"2026-11-30"'),
        (decimal.Decimal("1.5"), '"1.5"'),
        (float("nan"), "null"),
        (b"\xff\x00", '"_wA="'),
        ({1}, "[1]"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        (None, "null"),
        (ToolOutput.of_text("x"), "x"),
    ],
    ids=repr,
)
def test_what_a_tool_returns_is_made_plain(value: Any, text: str) -> None:
    assert to_output(value).text == text


def test_what_cannot_be_made_plain_is_refused_by_name() -> None:
    with pytest.raises(NotPlain, match="lock"):
        to_output({"x": threading.Lock()})


def test_a_commands_end_is_told_as_it_was() -> None:
    assert json.loads(exec_output(ExecResult(status="exited", exit_code=3, output="x")).text) == {
        "status": "completed",
        "exit_code": 3,
        "output": "x",
    }
    killed = exec_output(ExecResult(status="signaled", signal=9, output="abc"))
    assert json.loads(killed.text) == {"status": "signaled", "signal": 9, "output": "abc"}
    assert not killed.is_error
    assert exec_output(ExecResult(status="timed_out", output="abc")).is_error


async def test_a_tool_can_be_called_on_its_own() -> None:
    registry = ToolRegistry()

    class Args(BaseModel):
        n: int

    def double(ctx: ToolContext, args: Args) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return args.n * 2

    registry.add(ToolSpec("double", "Doubles.", Args, effect="read_only"), double)
    tool = registry.get("double")
    assert tool is not None
    assert (await tool.call({"n": 21})).text == "42"
    with pytest.raises(BadArguments):
        await tool.call({"n": "many"})
    asks = ToolRegistry()
    asks.tool(lambda: Interrupt(kind="approval"), name="ask")
    asking = asks.get("ask")
    assert asking is not None
    with pytest.raises(ConfigError, match="inside a run"):
        await asking.call({})


def test_a_context_shows_only_what_a_tool_may_use() -> None:
    public = {name for name in dir(ToolContext) if not name.startswith("_")}
    assert public == {"session_id", "call_key", "idempotency_key", "cancel", "progress", "sandbox"}
    with pytest.raises(AttributeError):
        ToolContext("s", "k", None, None).session_id = "x"  # type: ignore[misc, arg-type]  # the mistake is the point
