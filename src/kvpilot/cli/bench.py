"""``kvpilot bench …``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpilot.cli.options import ConfigOption, JsonFileOption, OwnStateOption, load
from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors

bench = typer.Typer(help="Benchmarks on the real stack.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench", rich_help_panel="Measuring")


@bench.command()
def tiers(
    model: Annotated[str, typer.Option("--model", "-m", help="m16k, m4x256, or a model folder.")] = "m16k",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas; multiples of 256.")
    ] = "8192,15360",
    with_33k: Annotated[
        bool, typer.Option("--with-33k", help="A context of 33,792 tokens too (recompute takes a minute).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 9,
    plugin: Annotated[
        bool,
        typer.Option("--plugin", help="With kvpilot's plug-in in vLLM: the variant kvpilot_device, too."),
    ] = False,
    variants: Annotated[
        str | None, typer.Option(help="Only these variants, with commas.", show_default="all")
    ] = None,
    json_file: JsonFileOption = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the results here (PNG).", show_default=False)
    ] = None,
    config: ConfigOption = None,
    state: OwnStateOption = None,
) -> None:
    """What a session's next turn costs when its KV was pushed out: kvpilot, passive, recompute, limits."""
    from kvpilot.backends.base import BackendError
    from kvpilot.bench.lab import BenchError
    from kvpilot.bench.tiers import chosen
    from kvpilot.bench.tiers_report import bench_tiers, plot, print_table
    from kvpilot.replay.client import ControlError
    from kvpilot.replay.run import write_json
    from kvpilot.stack.launch import own_state

    with user_errors(BenchError, ControlError, BackendError, ValueError):
        try:
            lengths = [int(part) for part in contexts.split(",") if part.strip()]
        except ValueError:
            raise ValueError(f"--contexts {contexts}: give numbers with commas between them") from None
        if with_33k:
            lengths.append(33_792)
        asked = chosen(variants, plugin=plugin or load(config, state).engine.plugin)
        with own_state("bench", state) as folder:
            settings = load(config, folder, engine={"model": model, "plugin": plugin or None})
            document = bench_tiers(settings, lengths, rounds, asked)
        if json_file is not None:
            write_json(json_file, document)
        print_table(document, console())
        if plot_file is not None:
            plot(document, plot_file)


@bench.command()
def gateway(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of one measurement.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    body_kb: Annotated[int, typer.Option(min=1, help="Size of a request's body.")] = 100,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of kvpilot's gateway.")] = 2,
    rivals: Annotated[
        bool, typer.Option(help="Compare with vllm-router and LiteLLM (installed on first use).")
    ] = True,
    growing: Annotated[
        bool, typer.Option(help="Measure how the coordinator keeps up with growing sessions.")
    ] = True,
    json_file: JsonFileOption = None,
) -> None:
    """What the gateway adds to each request, side by side with vllm-router and LiteLLM."""
    import sys

    from kvpilot.bench.gateway import GatewayBenchOptions, print_table, run_bench
    from kvpilot.replay.run import write_json

    options = GatewayBenchOptions(
        seconds=seconds, rounds=rounds, body_kb=body_kb, workers=workers, coordinator=growing
    )
    if not rivals:
        options = replace(options, rivals=())
    with user_errors(RuntimeError):
        document = run_bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@bench.command()
def hints(
    body_kb: Annotated[int, typer.Option(min=4, help="Size of a request's body.")] = 100,
    rounds: Annotated[int, typer.Option(min=100, help="Readings of each request.")] = 2000,
    json_file: JsonFileOption = None,
) -> None:
    """What reading hints costs: all dialects together, the body already read. Needs no stack."""
    from kvpilot.bench.hints import print_table, run_bench
    from kvpilot.replay.run import write_json

    document = run_bench(body_kb, rounds)
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@bench.command()
def engine(
    requests: Annotated[int, typer.Option(min=0, help="Requests of the soak; 0 = no soak.")] = 20_000,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the cost measurement; 0 = none.")] = 2000,
    running: Annotated[int, typer.Option(min=1, help="Requests that run at once there.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the soak: equal seeds, equal work.")] = 1,
    commands: Annotated[
        int, typer.Option(min=0, help="Control commands to an idle engine, on a stack of its own; 0 = none.")
    ] = 0,
    same_answers: Annotated[
        int, typer.Option(min=0, help="Requests answered by two stacks, steered and stock; 0 = none.")
    ] = 0,
    model: Annotated[str, typer.Option(help="Of these stacks.")] = "smollm2",
    json_file: JsonFileOption = None,
    config: ConfigOption = None,
    state: OwnStateOption = None,
) -> None:
    """The plug-in in vLLM's real scheduler without a model: a soak in random work, and what a step costs. On real
    stacks: with --commands what a control command takes, with --same-answers exit code 1 when an answer differs."""
    import sys

    from kvpilot.bench import engine as trials
    from kvpilot.bench.commands import bench_commands
    from kvpilot.bench.lab import BenchError
    from kvpilot.bench.same_answers import bench_same_answers
    from kvpilot.replay.run import write_json
    from kvpilot.stack import StackError
    from kvpilot.stack.launch import own_state

    with user_errors(BenchError, StackError):
        settings = load(config, None)
        document: dict[str, Any] = {
            "soak": trials.soak(settings, requests, seed) if requests else None,
            "cost": trials.cost(settings, running, steps) if steps else [],
            "commands": None,
            "same_answers": None,
        }
        if commands:
            with own_state("commands", state) as folder:
                settings = load(config, folder, engine={"model": model})
                document["commands"] = bench_commands(settings, commands)
        if same_answers:
            with own_state("same-answers", state) as folder:
                document["same_answers"] = bench_same_answers(
                    load(config, folder, engine={"model": model}),
                    same_answers,
                    seed,
                    lambda line: print(line, file=sys.stderr, flush=True),
                )
    if json_file is not None:
        write_json(json_file, document)
    trials.print_report(document, console())
    if same_answers and not document["same_answers"]["same"]:
        raise typer.Exit(1)


@bench.command()
def pressure(
    traces: Annotated[
        str, typer.Option(help="Recorded agents below $KVPILOT_TRACES, with commas.")
    ] = "agentcgroup,miniswe",
    pressures: Annotated[str, typer.Option(help="Working set ÷ device pool, with commas.")] = "1,1.5,2,4",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Draws of sessions; all policies play each.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first draw.")] = 0,
    calls: Annotated[
        int,
        typer.Option(
            min=1, help="Calls that follow one another; a session that ends is followed by another."
        ),
    ] = 14,
    context: Annotated[
        int, typer.Option(min=256, help="Longest context in tokens; all lengths are scaled to it.")
    ] = 3072,
    dram: Annotated[float, typer.Option(min=0.1, help="vLLM's DRAM tier ÷ the device pool.")] = 1.0,
    gap_scale: Annotated[float, typer.Option(min=0, help="Recorded pauses are multiplied by this.")] = 0.2,
    max_gap: Annotated[float, typer.Option(min=0, help="Longest pause in seconds after scaling.")] = 2.0,
    model: Annotated[str, typer.Option("--model", "-m", help="m4x256, m16k, or a model folder.")] = "m4x256",
    json_file: JsonFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Recorded agents on a real vLLM with a device pool that is too small for them: the plug-in against vLLM's LRU, and
    its ARC in DRAM."""
    import sys

    from kvpilot.bench.lab import BenchError
    from kvpilot.bench.pressure import PressureOptions, bench_pressure, print_report
    from kvpilot.replay.plan import ReplayOptions
    from kvpilot.replay.run import write_json
    from kvpilot.replay.text import TextError
    from kvpilot.stack import StackError
    from kvpilot.traces import TraceError

    with user_errors(BenchError, StackError, TraceError, TextError, ValueError):
        try:
            asked = tuple(float(part) for part in pressures.split(",") if part.strip())
        except ValueError:
            raise ValueError(f"--pressures {pressures}: give numbers with commas between them") from None
        document = bench_pressure(
            load(config, None),
            model,
            [name.strip() for name in traces.split(",") if name.strip()],
            PressureOptions(
                pressures=asked,
                rounds=rounds,
                lanes=sessions,
                calls=calls,
                seed=seed,
                context=context,
                dram=dram,
                replay=ReplayOptions(gap_scale=gap_scale, max_gap_s=max_gap, max_reply=8),
            ),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    if json_file is not None:
        write_json(json_file, document)
    print_report(document, console())


@bench.command()
def fuzz(
    count: Annotated[int, typer.Option(min=1, help="Generated requests.")] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the generator: equal seeds, equal requests.")] = 1,
    gateway_share: Annotated[
        float, typer.Option("--gateway", min=0, max=1, help="Share that goes through the whole gateway.")
    ] = 0.25,
    coordinator_share: Annotated[
        float, typer.Option("--coordinator", min=0, max=1, help="Share that goes on into the coordinator.")
    ] = 0.12,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the requests.")] = 1,
    seeds: Annotated[
        Path | None,
        typer.Option(help='Valid requests, a line each: {"body": {…}, "headers": {…}}.', show_default=False),
    ] = None,
    only: Annotated[
        int | None, typer.Option(min=0, help="Play this one case again and show it.", show_default=False)
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Odd requests and hints against gateway and coordinator, in this process: exit code 1 for any fault."""
    import sys

    from kvpilot.bench.fuzz.run import FuzzOptions, play_one, print_table, run_fuzz
    from kvpilot.replay.run import write_json

    options = FuzzOptions(count, seed, gateway_share, min(coordinator_share, gateway_share), seeds, jobs)
    with user_errors(ValueError, OSError):
        if only is not None:
            for name, value in play_one(only, options).items():
                console().print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
            return
        document = run_fuzz(options, lambda line: print(line, file=sys.stderr, flush=True))
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())
    if document["faults"]:
        raise typer.Exit(1)


@bench.command()
def sim(
    trace: Annotated[
        str, typer.Argument(help="A trace file, or a name below $KVPILOT_TRACES.")
    ] = "kv-cache-tester",
    policies: Annotated[str | None, typer.Option(help="Policies, with commas.", show_default="all")] = None,
    pressure: Annotated[float, typer.Option(min=0.01, help="Working set ÷ capacity.")] = 1.0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of the trace, at most.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy; the fastest counts.")] = 3,
    json_file: JsonFileOption = None,
) -> None:
    """How many calls a minute the simulator does with each policy. Needs no stack."""
    import sys

    from kvpilot.bench.sim import print_table, run_bench
    from kvpilot.replay.run import write_json
    from kvpilot.sim.policies import choose
    from kvpilot.traces import TraceError, find_trace

    with user_errors(TraceError, ValueError):
        document = run_bench(
            find_trace(trace),
            choose(policies),
            pressure,
            sessions,
            rounds,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@bench.command()
def plan(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions there are.")] = 100_000,
    references: Annotated[int, typer.Option(min=1, help="Chunks of all their contexts.")] = 20_000_000,
    decisions: Annotated[int, typer.Option(min=2, help="Decisions to measure.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of what the sessions do.")] = 1,
    json_file: JsonFileOption = None,
) -> None:
    """How long the planner takes for a decision with very many sessions. Needs no stack."""
    import sys

    from kvpilot.bench.plan import print_table, run_bench
    from kvpilot.replay.run import write_json

    document = run_bench(
        sessions, references, decisions, seed, lambda line: print(line, file=sys.stderr, flush=True)
    )
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@bench.command()
def forecast(
    conversations: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many are there at once.")
    ] = 10_000,
    json_file: JsonFileOption = None,
) -> None:
    """What a forecast costs, in CPU time. Needs no stack."""
    from kvpilot.bench.forecast import measure, print_table
    from kvpilot.replay.run import write_json

    document = measure(conversations)
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@bench.command()
def agreement(
    scenario: Annotated[str | None, typer.Option(help="Scenarios, with commas.", show_default="all")] = None,
    json_file: JsonFileOption = None,
    config: ConfigOption = None,
    state: OwnStateOption = None,
) -> None:
    """Recorded agents on a real stack with small tiers and in the simulator: exit code 1 where they differ."""
    from kvpilot.backends.base import BackendError
    from kvpilot.bench.agreement import bench_agreement, chosen, print_report
    from kvpilot.bench.lab import BenchError
    from kvpilot.replay.client import ControlError
    from kvpilot.replay.run import write_json
    from kvpilot.replay.text import TextError
    from kvpilot.stack.launch import own_state
    from kvpilot.traces import TraceError

    with user_errors(BenchError, ControlError, BackendError, TraceError, TextError, ValueError):
        scenarios = chosen(scenario)
        with own_state("agreement", state) as folder:
            document = bench_agreement(load(config, folder), scenarios)
    if json_file is not None:
        write_json(json_file, document)
    print_report(document, console())
    if not document["agrees"]:
        raise typer.Exit(1)
