"""Strict schemas: what OpenAI's strict mode takes of a JSON Schema. Pure.

Every property is required, what was optional may be null instead, nothing else is allowed, defaults go, a $ref has no
siblings. A null that comes back for such a property means "left out": tools/schema.py reads it so.
"""

from __future__ import annotations

from typing import Any


def strict_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in its strict form; the one given is left as it is."""
    made: dict[str, Any] = _strict(schema)
    return made


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return {"$ref": node["$ref"]}
    made = {key: _strict_part(key, value) for key, value in node.items() if key != "default"}
    if node.get("type") == "object" or "properties" in node:
        required = set(node.get("required", ()))
        properties = node.get("properties", {})
        made["properties"] = {
            name: _strict(value) if name in required else _nullable(value) for name, value in properties.items()
        }
        made["required"] = list(properties)
        made["additionalProperties"] = False
    return made


def _strict_part(key: str, value: Any) -> Any:
    if key in ("$defs", "definitions") and isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    return value if key in ("enum", "const", "required") else _strict(value)


def _nullable(value: Any) -> Any:
    made = _strict(value)
    if not isinstance(made, dict):
        return made
    alternatives = made.get("anyOf")
    if isinstance(alternatives, list):
        has_null = any(isinstance(item, dict) and item.get("type") == "null" for item in alternatives)
        return made if has_null else {**made, "anyOf": [*alternatives, {"type": "null"}]}
    description = made.pop("description", None)
    wrapped: dict[str, Any] = {"anyOf": [made, {"type": "null"}]}
    return wrapped | ({"description": description} if description is not None else {})
