"""The embedded stack in the simulator: what vLLM and LMCache keep, by their own rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.made_up import overlays

from kvpilot.sim.hardware import PROFILES
from kvpilot.sim.stack import StackOutcome, StackSizes, run_stack
from kvpilot.sim.workload import compile_workload
from kvpilot.traces import (
    Overlay,
    Placed,
    ToolRun,
    ToolUse,
    TraceAgent,
    TraceCall,
    TraceMessage,
    TraceSession,
)

PLENTY = 1000
BLOCK, CHUNK = 4, 16
HARDWARE = PROFILES["this-cpu-small"]


def sizes(device: int = PLENTY, host: int = PLENTY, disk: int = PLENTY) -> StackSizes:
    return StackSizes(BLOCK, CHUNK, device, host, disk, step_tokens=64)


def agent(name: str, *calls: tuple[float, int], tool_s: float | None = None) -> Placed:
    """Calls as (time, tokens that its prompt adds); each takes half a second, its reply is one token."""
    tools = () if tool_s is None else (ToolRun("t", "Bash", duration_s=tool_s),)
    uses = () if tool_s is None else (ToolUse("t", "Bash"),)
    made = tuple(
        TraceCall(
            agent="main",
            t_request=at,
            t_end=at + 0.5,
            keep=2 * index,
            add=(TraceMessage(f"{name}{index}", "user", tokens),),
            reply=TraceMessage(f"{name}-reply{index}", "assistant", 1, calls=uses),
            tools=tools,
        )
        for index, (at, tokens) in enumerate(calls)
    )
    return Placed(TraceSession("made-up", name, (TraceAgent("main"),), made), 0.0)


def play(*agents: Placed, size: StackSizes, acts: bool = False) -> StackOutcome:
    return run_stack(Overlay(agents, 0.0, 0), size, HARDWARE, acts)


def test_the_device_finds_whole_blocks_and_what_is_below_whole_chunks() -> None:
    returns = agent("a", (0.0, 23), (10.0, 20))
    assert play(returns, size=sizes(host=0, disk=0)).found.tolist() == [0, 24]
    assert play(returns, agent("b", (5.0, 30)), size=sizes(device=11)).found.tolist() == [0, 0, 16]


def test_of_a_prompt_that_is_there_wholly_the_last_token_is_computed() -> None:
    first, again = agent("a", (0.0, 16)), agent("a", (5.0, 16))
    assert play(first, again, size=sizes(host=0, disk=0)).found.tolist() == [0, 12]


def test_a_tier_above_its_watermark_gives_up_the_oldest_within_a_second() -> None:
    # Of ten chunks host memory keeps seven or less; the disk is off, the device too small for two contexts.
    size = sizes(device=24, host=10, disk=0)
    returns = agent("a", (0.0, 4 * CHUNK), (15.0, 5))
    found = play(returns, agent("b", (5.0, 4 * CHUNK)), agent("c", (10.0, 1)), size=size).found
    # Eight chunks reach the watermark: one goes, the tail of what is unused for longest.
    assert found.tolist() == [0, 0, 0, 3 * CHUNK]


def test_what_host_memory_has_no_room_for_is_not_stored_anywhere() -> None:
    returns = agent("a", (0.0, 4 * CHUNK), (10.0, 5))
    others = agent("b", (5.0, 150))
    assert play(returns, others, size=sizes(device=38, host=3)).found.tolist() == [0, 0, 0]
    assert play(returns, others, size=sizes(device=38, host=14)).found.tolist() == [0, 0, 4 * CHUNK]


def test_kvpilot_drops_what_ended_and_leaves_more_for_the_living() -> None:
    size = sizes(device=24, host=24, disk=24)
    live = agent("live", (0.0, 5 * CHUNK), (60.0, 5))
    over = [agent(f"over{n}", (5.0 + 5 * n, 5 * CHUNK)) for n in range(8)]
    assert play(live, *over, size=size).found[-1] == 0
    assert play(live, *over, size=size, acts=True).found[-1] == 5 * CHUNK


def test_a_finished_tool_brings_its_context_into_host_memory() -> None:
    size = sizes(device=24, host=16, disk=PLENTY)
    waits = agent("waits", (0.0, 5 * CHUNK), (90.0, 5), tool_s=80.0)
    others = [agent(f"o{n}", (5.0 + 5 * n, 5 * CHUNK), (200.0 + 5 * n, 5)) for n in range(8)]
    read_from_disk = play(waits, *others, size=size)
    brought = play(waits, *others, size=size, acts=True)
    call = 9
    assert read_from_disk.found[call] == brought.found[call] == 5 * CHUNK
    assert brought.ttft[call] < read_from_disk.ttft[call]


@settings(max_examples=40)
@given(overlays(), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_no_prompt_is_found_wholly_and_the_device_has_no_more_than_there_is(
    laid: Overlay, host: int, disk: int, acts: bool
) -> None:
    outcome = run_stack(laid, StackSizes(4, 8, 40, host, disk), HARDWARE, acts)
    assert (outcome.in_device <= outcome.found).all()
    assert (outcome.found < np.maximum(1, compile_workload(laid).prompt_tokens)).all()


def test_requests_that_wait_to_read_from_disk_leave_less_room_in_host_memory() -> None:
    # Two contexts lie on disk alone; copies of both do not fit into host memory, of one after the other they do.
    size = sizes(device=24, host=20, disk=PLENTY)

    def found(second: float) -> int:
        contexts = [
            agent(n, (5.0 * i, 5 * CHUNK), (at, 5)) for i, (n, at) in enumerate([("a", 60.0), ("b", second)])
        ]
        others = [agent(f"o{n}", (20.0 + 5 * n, 5 * CHUNK)) for n in range(4)]
        return int(play(*contexts, *others, size=size).found[-1])

    assert found(second=70.0) == 5 * CHUNK
    assert found(second=60.1) < 5 * CHUNK
