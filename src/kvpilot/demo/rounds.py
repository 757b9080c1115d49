"""One round of the demo: the same requests in the same order, in either mode.

Agents take turns; while an agent's tools run, short jobs of other tenants come and go. Nothing is measured while
another request runs. What differs between the modes is only whether kvpilot acts on what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpilot.bench.lab import BenchError, Lab
from kvpilot.demo.agents import JOB_QUESTIONS, SCRIPTS, Agent, job_documents, job_messages, system_prompt
from kvpilot.demo.tools import Toolbox
from kvpilot.domain import SignalKind
from kvpilot.replay.client import ChatResult


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, times in seconds, sizes in chunks. The live contexts fit the disk tier; together with
    those of ended jobs they do not."""

    system_tokens: int = 1100
    opened_tokens: int = 2600
    result_tokens: int = 300
    reply_tokens: int = 16
    job_tokens: int = 2700
    jobs_per_pause: int = 2
    hand_over_s: float = 0.5
    """From a tool's end to the agent's next request."""
    host_chunks: int = 48
    disk_chunks: int = 96
    max_model_len: int = 8192


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent's turn as it saw it. ``returning``: it has been here before, so its KV could have been kept."""

    agent: str
    turn: int
    returning: bool
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    reply: str


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys of one round's tenants. Every round has tenants of its own, so that the same texts share no KV."""

    agents: str
    others: str

    @classmethod
    def of_round(cls, number: int) -> Keys:
        return cls(f"demo-agents-{number}", f"demo-others-{number}")


class Round:
    """Plays the schedule once on tiers that are empty."""

    def __init__(
        self,
        lab: Lab,
        toolbox: Toolbox,
        load: Workload,
        run_id: str,
        keys: Keys,
        say: Callable[[str], None],
    ) -> None:
        self._lab, self._toolbox, self._load, self._run_id, self._say = lab, toolbox, load, run_id, say
        self._keys = keys
        pauses = sum(len(script.steps) for script in SCRIPTS)
        self._documents = job_documents(toolbox, load.job_tokens, pauses * load.jobs_per_pause)
        if len(self._documents) < pauses * load.jobs_per_pause:
            raise BenchError(f"this Python's library has only {len(self._documents)} files long enough")
        self._next_job = 0

    async def play(self) -> list[Turn]:
        """All turns in order. Raises BenchError when a request fails."""
        system = system_prompt(self._lab.texts, self._load.system_tokens)
        agents = [
            Agent(s, f"{self._run_id}-{s.name}", self._toolbox, self._load.result_tokens) for s in SCRIPTS
        ]
        turns: list[Turn] = []
        for agent in agents:
            agent.begin(system, self._load.opened_tokens)
            turns.append(await self._turn(agent, 0))
            await self._jobs()
        for number in range(1, 1 + max(len(script.steps) for script in SCRIPTS)):
            for agent in agents:
                await asyncio.to_thread(agent.run_tools)
                await self._signal(agent.session, SignalKind.TOOL_FINISHED, self._load.hand_over_s)
                await asyncio.sleep(self._load.hand_over_s)
                turns.append(await self._turn(agent, number))
                if agent.done:
                    await self._signal(agent.session, SignalKind.END)
                else:
                    await self._jobs()
        return turns

    async def _turn(self, agent: Agent, number: int) -> Turn:
        result = await self._chat(agent.messages, self._load.reply_tokens, agent.session, self._keys.agents)
        agent.replied(result.content)
        assert result.ttft_ms is not None
        self._say(
            f"{agent.script.name}, turn {number + 1}: {result.cached_tokens} of {result.prompt_tokens} tokens "
            f"from cache, first token after {result.ttft_ms:.0f} ms"
        )
        return Turn(
            agent.script.name,
            number,
            number > 0,
            result.prompt_tokens,
            result.cached_tokens,
            result.ttft_ms,
            result.content,
        )

    async def _jobs(self) -> None:
        """Other tenants' jobs, one after another: a document, two questions, the end."""
        for _ in range(self._load.jobs_per_pause):
            session = f"{self._run_id}-job-{self._next_job}"
            document = self._documents[self._next_job]
            self._next_job += 1
            replies: list[str] = []
            for _ in JOB_QUESTIONS:
                result = await self._chat(job_messages(document, replies), 4, session, self._keys.others)
                replies.append(result.content)
            await self._signal(session, SignalKind.END)

    async def _signal(self, session: str, kind: SignalKind, eta_s: float | None = None) -> None:
        await self._lab.control.signal(session, kind, eta_s=eta_s)

    async def _chat(
        self, messages: Sequence[dict[str, object]], tokens: int, session: str, key: str
    ) -> ChatResult:
        result = await self._lab.gateway.chat(messages, tokens, session=(session, session), api_key=key)
        if result.error is not None or result.ttft_ms is None:
            raise BenchError(f"a request failed: {result.status} {result.error}")
        return result
