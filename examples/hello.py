"""An agent with a tool of its own, in one process. The model is scripted: put "openai:MODEL" there for a real one."""

import asyncio

from greenroom import AgentConfig, AgentRuntime, Scripted, ToolContext, ToolRegistry

registry = ToolRegistry()


@registry.tool(effect="read_only", timeout=30)
async def weather(ctx: ToolContext, city: str, days: int = 1) -> dict[str, object]:
    """The weather of the next days."""
    ctx.progress.emit_text(f"looking {city} up")
    return {"city": city, "days": days, "sky": "clear"}


agent = AgentConfig(
    name="hello",
    provider=Scripted([{"calls": [{"name": "weather", "arguments": {"city": "Bern"}}]}, "Clear in Bern tomorrow."]),
    tools=registry,
)


async def main() -> None:
    async with AgentRuntime(storage="memory:") as runtime:
        session = await runtime.create_session(agent)
        async for event in session.stream("What will the weather be?"):
            if event.type == "text":
                print(event.text)
            elif event.type == "tool_started":
                print(f"({event.name})")


if __name__ == "__main__":
    asyncio.run(main())
