"""Two sub-agents in parallel over one sandbox, on Ray: each in an actor of its own."""

import asyncio

from greenroom import AgentConfig, Scripted, SubAgent, ToolRegistry, connect, register_default_tools

registry = ToolRegistry()
register_default_tools(registry, trust="host")


def bash(command: str) -> dict[str, object]:
    return {"calls": [{"name": "bash", "arguments": {"command": command}}]}


worker = AgentConfig(name="worker", provider=Scripted([bash("echo $$ >> pids"), "noted"]), tools=registry)
lead = AgentConfig(
    name="lead",
    provider=Scripted(
        [
            {"calls": [{"name": "work", "arguments": {"task": f"part {n}"}} for n in (1, 2)]},
            bash("wc -l < pids"),
            "Both parts are done.",
        ]
    ),
    tools=registry,
    sandbox="host",
    subagents={"work": SubAgent(worker, description="Does one part.", parallel=True)},
)


async def main() -> None:
    async with connect(storage="sqlite:///greenroom.db") as runtime:
        turn = await runtime.run_turn(lead, "Do both parts.")
        print(turn.result.status, turn.result.text)
        async for info in runtime.sessions(prefix=turn.session_id):
            print(info.session_id, info.state)


if __name__ == "__main__":
    asyncio.run(main())
