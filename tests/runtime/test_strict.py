"""Strict schemas, and what a model sends back for them."""

from __future__ import annotations

import copy
import json
from typing import Any

from pydantic import BaseModel
from scenes import CASES

from greenroom import ModelRequest
from greenroom.providers import encode_openai
from greenroom.runtime.calls import ToolSchema
from greenroom.runtime.providers.strict import strict_schema
from greenroom.runtime.tools.schema import json_schema, validate

CASE = json.loads((CASES / "C21_strict_mode.json").read_text())


class Opts(BaseModel):
    deep: bool = False
    name: str


class Arguments(BaseModel):
    path: str
    limit: int = 10
    tag: str | None = None
    opts: Opts = Opts(name="x")


class Tree(BaseModel):
    value: str
    children: list[Tree] | None = None


def objects(node: Any) -> list[dict[str, Any]]:
    found = [node] if isinstance(node, dict) and "properties" in node else []
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return found + [one for part in inner for one in objects(part)]


def test_every_property_is_required_and_nothing_else_is_allowed() -> None:
    schema = json_schema(Arguments)
    before = copy.deepcopy(schema)
    strict = strict_schema(schema)
    assert schema == before
    want = CASE["strict_parameters"]
    assert (strict["required"], strict["additionalProperties"]) == (want["required"], want["additionalProperties"])
    for node in objects(strict):
        assert node["required"] == list(node["properties"])
        assert node["additionalProperties"] is False
    assert '"default"' not in json.dumps(strict)
    assert {"type": "null"} in strict["properties"]["limit"]["anyOf"]
    assert {"type": "null"} in strict["properties"]["opts"]["anyOf"]
    assert strict["properties"]["tag"]["anyOf"].count({"type": "null"}) == 1
    assert strict["properties"]["path"]["type"] == "string"


def test_what_a_model_sends_for_it_is_read_as_left_out() -> None:
    got = validate(Arguments, CASE["then"]["model_sends"])
    assert got == Arguments(path="x")


def test_recursive_schemas_stay_recursive_and_references_stand_alone() -> None:
    strict = strict_schema(json_schema(Tree))
    text = json.dumps(strict)
    assert "$ref" in text
    assert strict["type"] == "object"

    def lonely(node: Any) -> bool:
        if isinstance(node, dict):
            return ("$ref" not in node or set(node) == {"$ref"}) and all(map(lonely, node.values()))
        return all(map(lonely, node)) if isinstance(node, list) else True

    assert lonely(strict)


def test_it_is_only_sent_where_it_is_asked_for() -> None:
    tool = ToolSchema("t", "d", json_schema(Arguments))
    request = ModelRequest(session_id="s", call_no=0, system=None, messages=(), tools=(tool,))
    assert encode_openai(request)["tools"][0]["function"]["parameters"] == tool.parameters
    function = encode_openai(request, strict=True)["tools"][0]["function"]
    assert function["strict"] is True
    assert function["parameters"] == strict_schema(tool.parameters)
