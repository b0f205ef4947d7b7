"""From a function's signature to an argument model, from a model to a JSON Schema, from what a model sent to values.

The repairs made to arguments are those that real models need and that cannot change what was right: null for an
optional field means "left out"; a JSON text is decoded only where the field is a list or an object, never where it
is a string. Everything else is the validator's word, turned into a sentence the model can act on.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import types
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from greenroom.runtime.calls import ToolContext
from greenroom.runtime.errors import ConfigError


class BadArguments(ValueError):
    """Arguments that do not fit; the text is for the model."""


def model_of_signature(function: Callable[..., Any]) -> tuple[type[BaseModel], str | None]:
    """The argument model of a function and the name of its ToolContext parameter, if it has one.

    Raises ConfigError for a parameter without an annotation and for *args and **kwargs.
    """
    name = getattr(function, "__name__", "tool")
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"tool {name!r}: the annotation {error.name!r} cannot be resolved",
            hint="Import the type at module level, where the function is defined",
        ) from None
    docs = described(function)[1]
    fields: dict[str, Any] = {}
    context: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name!r}: {parameter} cannot be offered to a model", hint="Name every parameter")
        hint = hints.get(parameter.name)
        if hint is None:
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} has no annotation", hint="Add its type")
        if hint is ToolContext:
            context = parameter.name
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            doc = docs.get(parameter.name)
            if doc and not _has_description(hint):
                default = _described(default, doc)
            fields[parameter.name] = (hint, default)
    model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    return model, context


def described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter (Google, NumPy or Sphinx style)."""
    text = inspect.getdoc(function) or ""
    if not any(mark in text for mark in ("Args:", "Arguments:", "Parameters", ":param", "@param")):
        return text, {}
    import docstring_parser  # only here: few need it

    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return text, {}
    docs = {param.arg_name: " ".join((param.description or "").split()) for param in parsed.params}
    if not docs:
        return text, {}
    kept = [parsed.description or "", *docs, *docs.values(), *(param.type_name or "" for param in parsed.params)]
    more = set(_words(text) - _words(" ".join(kept))) - {"args", "arguments", "parameters", "param"}
    return (text if more else (parsed.description or "").strip()), docs


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def _described(default: Any, doc: str) -> Any:
    """The parameter's default with a description, unless it has one."""
    if not isinstance(default, FieldInfo):
        return Field(default, description=doc)
    if default.description:
        return default
    described = copy.copy(default)
    described.description = doc
    described._attributes_set = default._attributes_set | {"description": doc}
    return described


def _has_description(hint: Any) -> bool:
    metadata = getattr(hint, "__metadata__", ())
    return any(isinstance(item, FieldInfo) and item.description for item in metadata)


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON Schema with an object at the root (a recursive model's bare $ref is opened), without titles."""
    return copy.deepcopy(_json_schema(model))


@lru_cache(maxsize=1024)
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    reference = schema.pop("$ref", None)
    if reference is not None:
        schema = {**schema["$defs"][reference.rsplit("/", 1)[1]], **schema}
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    without_titles: dict[str, Any] = _drop_titles(schema)
    return without_titles


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`: "" is {}; an object encoded twice is decoded twice; None for anything else."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_problem(text: str) -> str:
    """Why `text` is no JSON object, for the model."""
    try:
        value = json.loads(text)
    except RecursionError:
        return "the arguments are nested too deeply"
    except ValueError as error:
        return f"the arguments are not valid JSON: {error}"
    return f"the arguments must be a JSON object, not {type(value).__name__}"


def validate(model: type[BaseModel], arguments: dict[str, Any]) -> BaseModel:
    """The arguments as the model's instance; raises BadArguments naming every field and what it expects."""
    by_name = _fields_by_name(model)
    unknown = sorted(set(arguments) - set(by_name)) if model.model_config.get("extra") != "allow" else []
    repaired = {
        key: _repair(value, by_name[key].annotation)
        for key, value in arguments.items()
        if key in by_name and not _left_out(value, by_name[key])
    }
    if model.model_config.get("extra") == "allow":
        repaired.update({key: value for key, value in arguments.items() if key not in by_name})
    problems = []
    if unknown:
        allowed = ", ".join(by_name) or "none"
        problems.append(f"unknown argument {', '.join(map(repr, unknown))} (allowed: {allowed})")
    instance = None
    try:
        instance = model.model_validate(repaired)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            where = ".".join(str(part) for part in item["loc"]) or "arguments"
            if item["type"] == "missing":
                problems.append(f"{where}: required, but missing")
            else:
                problems.append(f"{where}: {item['msg']} (got {_shown(item['input'])})")
    if problems or instance is None:
        raise BadArguments("; ".join(problems))
    return instance


@lru_cache(maxsize=1024)
def _fields_by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _left_out(value: Any, field: FieldInfo) -> bool:
    """null for a field that takes a default and no null: the model means "not given"."""
    return value is None and (field.is_required() or not _takes_none(field.annotation))


def _takes_none(annotation: Any) -> bool:
    return annotation is Any or annotation is type(None) or any(_takes_none(part) for part in _alternatives(annotation))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    return get_args(annotation) if origin in (Union, types.UnionType) else ()


def _repair(value: Any, annotation: Any) -> Any:
    """Decodes a JSON text where the field holds lists or objects and cannot be a string."""
    if not isinstance(value, str):
        return value
    kinds = {_kind(part) for part in _alternatives(annotation) or (annotation,)} - {None}
    if not kinds or not kinds <= {list, dict}:
        return value
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, tuple(k for k in kinds if k is not None)) else value


def _kind(annotation: Any) -> type | None:
    """list, dict, or another type; None for null."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    origin = get_origin(annotation) or annotation
    if origin is type(None):
        return None
    if origin in (list, tuple, set, frozenset):
        return list
    if origin is dict or (isinstance(origin, type) and issubclass(origin, BaseModel)):
        return dict
    return origin if isinstance(origin, type) else object


def _drop_titles(node: Any) -> Any:
    if isinstance(node, list):
        return [_drop_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            kept[key] = {name: _drop_titles(inner) for name, inner in value.items()}
        else:
            kept[key] = _drop_titles(value)
    return kept


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
