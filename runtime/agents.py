"""Agents as documents: how an AgentConfig is stored, sent and found again.

Every part of it takes one of these forms: our own parts by type and fields; `{"ref": "module:qualname"}` where
importing that yields the very object; `{"class": "module:Class", "config": {…}}` for pydantic and dataclass instances;
`{"local": name}` for everything else (a script's own functions, lambdas), which is never stored and travels by value.
A sub-agent is a document of its own, named by its digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from greenroom.runtime.calls import SandboxSpec, compact_json
from greenroom.runtime.compaction import SummaryCompactor
from greenroom.runtime.config import AgentConfig, SubAgent, load_attribute
from greenroom.runtime.errors import AgentUnavailable, ConfigError
from greenroom.runtime.limits import Limits
from greenroom.runtime.ports import Compactor
from greenroom.runtime.providers.anthropic import Anthropic
from greenroom.runtime.providers.endpoint import Endpoint
from greenroom.runtime.providers.openai import OpenAICompatible
from greenroom.runtime.providers.scripted import Scripted
from greenroom.runtime.skills import SkillManager
from greenroom.runtime.tools.builtin import YIELD_AFTER, builtin_tool
from greenroom.runtime.tools.read_skill import READ_SKILL
from greenroom.runtime.tools.registry import Tool, ToolRegistry, ToolSpec

_ENDPOINTS: dict[type[Any], str] = {OpenAICompatible: "openai", Anthropic: "anthropic"}

_SPEC_FIELDS = (
    "name",
    "description",
    "effect",
    "timeout",
    "yield_after",
    "may_interrupt",
    "runs_in",
    "needs_sandbox",
    "needs_isolation",
)


@dataclass(frozen=True)
class AgentPacket:
    """An agent and its sub-agents: documents by digest, and the local parts that only travel by value."""

    digest: str
    documents: Mapping[str, dict[str, Any]]
    locals: Mapping[str, Any] = field(default_factory=dict)


def pack(agent: AgentConfig) -> AgentPacket:
    """The agent's packet; the same one for the same config object."""
    packet = agent.__dict__.get("_packet")
    if packet is None:
        packet = _Packer().pack(agent)
        object.__setattr__(agent, "_packet", packet)
    assert isinstance(packet, AgentPacket)
    return packet


def unpack(packet: AgentPacket) -> AgentConfig:
    """The agent of a packet; raises AgentUnavailable naming what this process does not have."""
    return _Unpacker(packet).agent(packet.digest)


def encode_document(document: dict[str, Any]) -> bytes:
    return compact_json(document).encode()


def decode_document(body: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(body)
    return document


def subagent_digests(document: dict[str, Any]) -> list[str]:
    """Digests of the documents that this one needs."""
    return [entry["agent"] for entry in document["subagents"].values() if entry["agent"] != "self"]


class _Packer:
    """Collects documents and local parts; `mark` keeps two scripts' equally named parts apart."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex[:12]
        self.documents: dict[str, dict[str, Any]] = {}
        self.locals: dict[str, Any] = {}
        self.modules: dict[str, str] = {}

    def pack(self, agent: AgentConfig) -> AgentPacket:
        return AgentPacket(self._agent(agent), self.documents, self.locals)

    def _agent(self, agent: AgentConfig) -> str:
        outer, self.modules = self.modules, {}
        document = {
            "name": agent.name,
            "provider": self._part(agent.llm, f"{agent.name}/provider"),
            "fallbacks": [
                self._part(provider, f"{agent.name}/fallback/{number}")
                for number, provider in enumerate(agent.providers[1:])
            ],
            "system_prompt": agent.system_prompt,
            "temperature": agent.temperature,
            "max_tokens": agent.max_tokens,
            "tools": [self._tool(tool, agent.name) for tool in agent.registry if tool.builtin != READ_SKILL],
            "skills": agent.skill_manager.to_json(),
            "subagents": {
                name: {
                    "agent": "self" if sub.agent == "self" else self._agent(sub.agent),
                    "description": sub.description,
                    "parallel": sub.parallel,
                }
                for name, sub in (
                    (name, value) for name, value in agent.subagents.items() if isinstance(value, SubAgent)
                )
            },
            "sandbox": None if agent.sandbox_spec is None else agent.sandbox_spec.model_dump(mode="json"),
            "limits": agent.limits.model_dump(mode="json"),
            "durability": agent.durability,
            "middleware": [
                self._part(part, f"{agent.name}/middleware/{number}") for number, part in enumerate(agent.middleware)
            ],
            "policy": None if agent.policy is None else self._part(agent.policy, f"{agent.name}/policy"),
            "compactor": self._compactor(agent.compactor, agent.name),
            "code": self.modules,
        }
        self.modules = outer
        digest = hashlib.sha256(encode_document(document)).hexdigest()
        self.documents[digest] = document
        return digest

    def _tool(self, tool: Tool, owner: str) -> dict[str, Any]:
        if tool.builtin is not None:
            trust: Literal["sandboxed", "host"] = "sandboxed" if tool.spec.needs_isolation else "host"
            entry = {"type": "builtin", "name": tool.builtin, "trust": trust}
            shipped = builtin_tool(tool.builtin, trust)
            changed = shipped.spec.yield_after != tool.spec.yield_after
            return entry | ({"yield_after": tool.spec.yield_after} if changed else {})
        function = self._reference(tool.function)
        arguments = None if tool.calling == "fields" else self._reference(tool.spec.arguments)
        if function is None or (arguments is None and tool.calling == "model"):
            return self._local(tool, f"{owner}/{tool.spec.name}")
        spec = {name: getattr(tool.spec, name) for name in _SPEC_FIELDS}
        return {"type": "function", "function": function, "arguments": arguments, "spec": spec}

    def _compactor(self, compactor: Compactor | None, owner: str) -> dict[str, Any] | None:
        if compactor is None:
            return None
        if type(compactor) is not SummaryCompactor:
            return self._part(compactor, f"{owner}/compactor")
        provider = None if compactor.provider is None else self._part(compactor.provider, f"{owner}/compactor")
        return {"type": "summary", "max_tokens": compactor.max_tokens, "keep": compactor.keep, "provider": provider}

    def _part(self, part: object, name: str) -> dict[str, Any]:
        endpoint = _ENDPOINTS.get(type(part))  # a subclass is its own: it travels by its class or by value
        if endpoint is not None and isinstance(part, Endpoint):
            return {"type": endpoint, **part.settings()}
        if type(part) is Scripted and _is_plain(part.script):
            return {"type": "scripted", "script": list(part.script), "name": part.name}
        described = self._described(part)
        return described if described is not None else self._local(part, name)

    def _described(self, part: object) -> dict[str, Any] | None:
        """The class form of a pydantic or dataclass instance whose fields are plain, or of one that holds nothing."""
        reference = self._reference(type(part))
        if reference is None:
            return None
        if isinstance(part, BaseModel):
            config: Any = part.model_dump(mode="json")
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            config = {item.name: getattr(part, item.name) for item in dataclasses.fields(part) if item.init}
        elif _holds_nothing(part):
            config = {}
        else:
            return None
        return {"class": reference["ref"], "config": config} if _is_plain(config) else None

    def _reference(self, target: Any) -> dict[str, Any] | None:
        """The ref form of an object that importing yields again; notes its module's source hash."""
        module_name, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if module_name in (None, "__main__", "__mp_main__") or not qualname or "<" in qualname:
            return None
        try:
            if load_attribute(f"{module_name}:{qualname}") is not target:
                return None
            self.modules[module_name] = hashlib.sha256(inspect.getsource(sys.modules[module_name]).encode()).hexdigest()
        except (ConfigError, OSError, TypeError):
            return None
        return {"ref": f"{module_name}:{qualname}"}

    def _local(self, part: object, name: str) -> dict[str, Any]:
        key = f"{name}#{self.mark}"
        self.locals[key] = part
        return {"local": key}


class _Unpacker:
    def __init__(self, packet: AgentPacket) -> None:
        self._packet = packet

    def agent(self, digest: str) -> AgentConfig:
        document = self._packet.documents[digest]
        spec = document["sandbox"]
        agent = AgentConfig(
            name=document["name"],
            provider=self._part(document["provider"]),
            fallbacks=[self._part(entry) for entry in document.get("fallbacks", ())],
            system_prompt=document["system_prompt"],
            temperature=document["temperature"],
            max_tokens=document["max_tokens"],
            tools=ToolRegistry(self._tool(entry) for entry in document["tools"]),
            subagents={
                name: SubAgent(
                    "self" if entry["agent"] == "self" else self.agent(entry["agent"]),
                    entry["description"],
                    entry["parallel"],
                )
                for name, entry in document["subagents"].items()
            },
            sandbox=None if spec is None else SandboxSpec.model_validate(spec),
            limits=Limits.model_validate(document["limits"]),
            durability=document["durability"],
            compactor=self._compactor(document.get("compactor")),
            skills=SkillManager.from_json(document.get("skills", ())),
            middleware=[self._part(entry) for entry in document.get("middleware", ())],
            policy=None if document.get("policy") is None else self._part(document["policy"]),
        )
        # Packed again, here or in another process, it is the same agent under the same digest.
        object.__setattr__(agent, "_packet", dataclasses.replace(self._packet, digest=digest))
        return agent

    def _compactor(self, entry: dict[str, Any] | None) -> Compactor | None:
        if entry is None or entry.get("type") != "summary":
            return None if entry is None else self._part(entry)
        provider = None if entry["provider"] is None else self._part(entry["provider"])
        return SummaryCompactor(max_tokens=entry["max_tokens"], keep=entry["keep"], provider=provider)

    def _tool(self, entry: dict[str, Any]) -> Tool:
        if "local" in entry:
            tool = self._local(entry["local"])
            assert isinstance(tool, Tool)
            return tool
        if entry["type"] == "builtin":
            return builtin_tool(entry["name"], entry["trust"], entry.get("yield_after", YIELD_AFTER))
        function, spec = self._load(entry["function"]["ref"]), entry["spec"]
        if entry["arguments"] is not None:
            return Tool(ToolSpec(arguments=self._load(entry["arguments"]["ref"]), **spec), function)
        registry = ToolRegistry()
        registry.tool(function)
        (made,) = registry
        return dataclasses.replace(made, spec=ToolSpec(arguments=made.spec.arguments, **spec))

    def _part(self, entry: dict[str, Any]) -> Any:
        if "local" in entry:
            return self._local(entry["local"])
        if "class" in entry:
            return self._load(entry["class"])(**entry["config"])
        for kind, name in _ENDPOINTS.items():
            if entry["type"] == name:
                return kind(**{key: value for key, value in entry.items() if key != "type"})
        return Scripted(entry["script"], name=entry["name"])

    def _load(self, reference: str) -> Any:
        try:
            return load_attribute(reference)
        except ConfigError as error:
            raise AgentUnavailable(
                f"the agent needs {reference}, which this process does not have: {error.message}",
                hint="Make the module importable here, or open the session with agent=...",
            ) from error

    def _local(self, name: str) -> Any:
        if name not in self._packet.locals:
            raise AgentUnavailable(
                f"the agent's part {name.partition('#')[0]!r} was defined in a script and is not stored",
                hint="Open the session with agent=... from that script, or define the part in an importable module",
            )
        return self._packet.locals[name]


def _holds_nothing(part: object) -> bool:
    """Whether calling its class without arguments makes the same again: a plain class, nothing in its instance."""
    kind = type(part)
    plain = kind.__init__ is object.__init__ and kind.__new__ is object.__new__
    return plain and not getattr(part, "__dict__", None) and not any("__slots__" in vars(base) for base in kind.__mro__)


def _is_plain(value: Any) -> bool:
    """Whether a value comes back from JSON as it went in."""
    if value is None or isinstance(value, str | bool | int | float):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, list | tuple) and all(_is_plain(item) for item in value)
