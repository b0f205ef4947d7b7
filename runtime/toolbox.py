"""Toolbox: everything one agent may call, its tools and its sub-agents, as the model sees it and the loop runs it."""

from __future__ import annotations

from copy import deepcopy

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import Effect, ToolSchema, compact_json
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import PreflightError
from greenroom.runtime.journal import CallRecord, Outcome, call_digest
from greenroom.runtime.messages import ToolCallBlock
from greenroom.runtime.tools.registry import Tool
from greenroom.runtime.tools.schema import BadArguments, json_schema, parse_object, parse_problem, validate


class SpawnArguments(BaseModel):
    """The one argument of every spawn tool."""

    model_config = ConfigDict(extra="forbid")

    task: str = Field(description="What the sub-agent is to do: it sees nothing else of this conversation")


class Toolbox:
    """Of one run: what was validated when a batch was opened is not validated again when it runs."""

    def __init__(self, agent: AgentConfig) -> None:
        self._agent = agent
        self._validated: dict[str, BaseModel] = {}
        self.schemas = tuple(tool.schema for tool in agent.registry) + tuple(map(self._spawn_schema, agent.subagents))

    def find(self, name: str) -> Tool | None:
        return self._agent.registry.get(name)

    def effect(self, name: str) -> Effect:
        """What a call of this name would be recorded as."""
        tool = self.find(name)
        return tool.spec.effect if tool is not None else "idempotent" if name in self._agent.subagents else "effectful"

    def preflight(self, sandbox_kind: str | None) -> None:
        """Raises PreflightError when a tool needs a sandbox, or an isolating one, that the session does not have."""
        for tool in self._agent.registry:
            if tool.spec.needs_sandbox and sandbox_kind is None:
                raise PreflightError(
                    f"the tool {tool.spec.name!r} needs a sandbox and agent {self._agent.name!r} has none",
                    hint='Give the agent sandbox="bubblewrap" or sandbox="host", or leave the tool out',
                )
            if tool.spec.needs_isolation and sandbox_kind == "host":
                raise PreflightError(
                    f"the tool {tool.spec.name!r} wants an isolating sandbox and 'host' enforces no isolation",
                    hint='Register it with trust="host" if commands may run on this machine as they are',
                )

    def record(self, block: ToolCallBlock, key: str) -> CallRecord:
        """The call as it will run; one that cannot run carries its error as outcome already."""
        arguments = block.arguments if block.arguments is not None else parse_object(block.raw_arguments)
        if self._agent.middleware:  # a hook has seen the block, and may have kept it
            arguments = deepcopy(arguments)
        digest, size = call_digest(block.name, arguments or {})
        record = CallRecord.trusted(
            key=key, call_id=block.id, name=block.name, arguments=arguments or {}, digest=digest, size=size
        )
        tool = self.find(block.name)
        if tool is None and block.name not in self._agent.subagents:
            known = ", ".join(schema.name for schema in self.schemas) or "none"
            return _refused(record, f"Unknown tool {block.name!r}. Tools are: {known}")
        if arguments is None:
            return _refused(record, f"Not run: {parse_problem(block.raw_arguments)}")
        try:
            self._validated[key] = validate(tool.spec.arguments if tool else SpawnArguments, arguments)
        except BadArguments as problem:
            return _refused(record, f"Not run, bad arguments: {problem}")
        if tool is None:
            parallel = self._agent.subagent(block.name).parallel
            return record.but(spawns=True, effect="idempotent", parallel=parallel)
        spec = tool.spec
        return record.but(effect=spec.effect, runs_in=spec.runs_in, may_interrupt=spec.may_interrupt)

    def arguments(self, tool: Tool, call: CallRecord) -> BaseModel:
        """The call's arguments as its tool takes them; each may be fetched once."""
        found = self._validated.pop(call.key, None)
        return found if found is not None else validate(tool.spec.arguments, call.arguments)

    def _spawn_schema(self, name: str) -> ToolSchema:
        child = self._agent.subagent(name)
        description = child.description
        if description is None:
            agent = self._agent.child_agent(name)
            description = f"Give a task to the sub-agent {agent.name!r} and get its result."
        return ToolSchema(name, description, json_schema(SpawnArguments))


def spawn_output(child_id: str, status: str, text: str | None, detail: str | None) -> str:
    """A child's end as its parent's model sees it."""
    shown = {"status": status, "child_session_id": child_id, "final_resp": text, "detail": detail}
    return compact_json({key: value for key, value in shown.items() if value is not None})


def _refused(record: CallRecord, text: str) -> CallRecord:
    return record.but(outcome=Outcome.error(text, counts=True))
