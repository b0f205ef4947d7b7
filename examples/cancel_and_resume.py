"""Cancel a run in the middle of a command, see that nothing is left of it, and go on later."""

import asyncio

from greenroom import AgentConfig, AgentRuntime, Scripted, ToolRegistry, register_default_tools

registry = ToolRegistry()
register_default_tools(registry, trust="host")
agent = AgentConfig(
    name="patient",
    provider=Scripted([{"calls": [{"name": "bash", "arguments": {"command": "sleep 600"}}]}, "I was stopped; done."]),
    tools=registry,
    sandbox="host",
)


async def main() -> None:
    async with AgentRuntime(storage="sqlite:///greenroom.db") as runtime:
        session = await runtime.create_session(agent)
        run = asyncio.create_task(session.run("Wait for it."))
        await asyncio.sleep(1)
        await session.cancel("changed my mind")
        print((await run).status)
        for message in (await session.transcript()).messages:
            print(message.role, message.text or [block.type for block in message.content])
        resumed = await session.resume()
        print(resumed.status if resumed else None, resumed.text if resumed else None)


if __name__ == "__main__":
    asyncio.run(main())
