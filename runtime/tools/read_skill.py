"""readSkill: the tool by which a model reads the skills of its agent."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ToolContext, ToolOutput
from greenroom.runtime.messages import clean
from greenroom.runtime.skills import SkillError, SkillManager
from greenroom.runtime.tools.output import plain_json
from greenroom.runtime.tools.registry import Tool, ToolSpec

READ_SKILL = "readSkill"


class ReadSkillArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    skill_id: str = Field(description="The id of the skill, as the index gives it")
    path: str | None = Field(default=None, description="A resource of the skill; its instructions unless given")


def read_skill_tool(skills: SkillManager) -> Tool:
    async def read_skill(ctx: ToolContext, arguments: ReadSkillArguments) -> ToolOutput:
        try:
            read = skills.read(arguments.skill_id, arguments.path)
        except SkillError as error:
            return ToolOutput.of_text(f"{error.kind}: {error}", is_error=True)
        shown = {"skill_id": read.skill_id, "path": read.path or "", "content": clean(read.content)}
        return ToolOutput.of_text(plain_json({**shown, "resources": list(read.resources)}))

    description = "Reads the instructions of a skill, or one of its resources."
    spec = ToolSpec(READ_SKILL, description, ReadSkillArguments, effect="read_only")
    return Tool(spec, read_skill, builtin=READ_SKILL)  # it comes with the agent's skills, wherever that is made again
