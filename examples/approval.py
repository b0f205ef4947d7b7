"""A tool that asks before it acts: the run is suspended, the answer may come from any process, any time later."""

import asyncio

from greenroom import AgentConfig, AgentRuntime, Interrupt, Scripted, ToolRegistry

registry = ToolRegistry()


@registry.tool(may_interrupt=True)
def approve(action: str) -> Interrupt:
    """Asks a person for leave."""
    return Interrupt(kind="approval", payload={"action": action})


agent = AgentConfig(
    name="careful",
    provider=Scripted([{"calls": [{"name": "approve", "arguments": {"action": "deploy"}}]}, "Deployed, as allowed."]),
    tools=registry,
)


async def main() -> None:
    async with AgentRuntime(storage="memory:") as runtime:
        session = await runtime.create_session(agent)
        result = await session.run("Deploy it.")
        assert result.interrupt is not None
        print(result.status, result.interrupt.payload)
        answered = await session.answer(result.interrupt.id, {"decision": "allow"})
        print(answered.status, answered.text)


if __name__ == "__main__":
    asyncio.run(main())
