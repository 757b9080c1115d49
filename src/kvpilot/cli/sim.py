"""``kvpilot sim …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors

sim = typer.Typer(help="Recorded agents against simulated caches.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(sim, name="sim", rich_help_panel="Measuring")
    app.command(rich_help_panel="Measuring")(plan_capacity)


@sim.command()
def compare(
    traces: Annotated[
        list[str], typer.Argument(help="Trace files or folders, or names below $KVPILOT_TRACES.")
    ],
    tiers: Annotated[str, typer.Option(help="Memory tiers: one, or those of a --profile.")] = "one",
    profile: Annotated[
        str | None,
        typer.Option(
            help="Times to first token on a machine with several tiers: h100-nvme, ascend-nvme, this-cpu.",
            show_default=False,
        ),
    ] = None,
    pressure: Annotated[str, typer.Option(help="Working set ÷ capacity, with commas.")] = "0.7,1,1.5,2,3",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of each trace, at most.")] = 120,
    seed: Annotated[int, typer.Option(help="How sessions are drawn and laid over one another.")] = 1,
    policies: Annotated[str | None, typer.Option(help="Policies, with commas.", show_default="all")] = None,
    hints: Annotated[str, typer.Option(help="What policies may know: none, lifecycle.")] = "none,lifecycle",
    window: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds in which sessions start.", show_default="so that about 20 are live"
        ),
    ] = None,
    pin: Annotated[
        str,
        typer.Option(
            help="How long what a request uses is safe from eviction: call (to its end: an engine's memory), "
            "lookup (a tier below the engine, which loads a copy).",
            show_default="lookup",
        ),
    ] = "",
    bytes_per_token: Annotated[int, typer.Option(min=1, help="Size of a token's KV.")] = 131_072,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all rows here.", show_default=False)
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw hit rates, or times, along pressure here (PNG, SVG).", show_default=False
        ),
    ] = None,
) -> None:
    """Hit rates of cache policies side by side, and how much of the gap from LRU to the optimum they close."""
    import sys

    from kvpilot.replay.plan import Hints
    from kvpilot.replay.run import write_json
    from kvpilot.sim import compare_tiers
    from kvpilot.sim.compare import Options, numbers, print_table
    from kvpilot.sim.compare import compare as run
    from kvpilot.sim.one_tier import DEFAULT_PIN, Pin
    from kvpilot.sim.plot import plot
    from kvpilot.sim.policies import choose
    from kvpilot.traces import TraceError, find_traces

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with user_errors(TraceError, ValueError):
        if tiers != "one":
            raise ValueError(f"--tiers {tiers}: give one, or --profile for several")
        try:
            levels = tuple(Hints(part.strip()) for part in hints.split(",") if part.strip())
        except ValueError:
            levels = ()
        if not levels:
            raise ValueError(f"--hints {hints}: give none, lifecycle or both with a comma")
        if pin not in ("", *Pin):
            raise ValueError(f"--pin {pin}: give {' or '.join(Pin)}")
        options = Options(
            policies=choose(policies),
            pressures=numbers(pressure, "--pressure"),
            hints=levels,
            sessions=sessions,
            seed=seed,
            window_s=window,
            bytes_per_token=bytes_per_token,
            pin=Pin(pin) if pin else DEFAULT_PIN,
        )
        paths = [path for name in traces for path in find_traces(name)]
        if profile is not None:
            document = compare_tiers.compare_tiers(
                paths, options, compare_tiers.hardware_named(profile), tell
            )
        else:
            document = run(paths, options, tell)
    if json_file is not None:
        write_json(json_file, document)
    if profile is not None:
        compare_tiers.print_table(document, console())
    else:
        print_table(document, console())
    if plot_file is not None:
        with user_errors(ValueError):
            plot(document, plot_file)


def plan_capacity(
    traces: Annotated[
        list[str], typer.Argument(help="Trace files or folders, or names below $KVPILOT_TRACES.")
    ],
    profile: Annotated[str, typer.Option(help="Machine: h100-nvme, ascend-nvme, this-cpu, this-cpu-small.")],
    ttft_p90: Annotated[
        float,
        typer.Option("--ttft-p90", help="Nine of ten requests have their first token in so many seconds."),
    ],
    policy: Annotated[
        str, typer.Option(help="Who decides what lies where: kvpilot, lru, continuum …")
    ] = "kvpilot",
    hints: Annotated[str, typer.Option(help="What the policy may know: none, lifecycle.")] = "none",
    device_gb: Annotated[
        str | None,
        typer.Option(
            "--device-gb",
            help="Sizes of KV memory in the device to choose from, with commas.",
            show_default="¼, ½, 1 and 2 working sets",
        ),
    ] = None,
    host_gb: Annotated[
        str | None,
        typer.Option("--host-gb", help="… of host memory.", show_default="½, 1, 2 and 4 working sets"),
    ] = None,
    disk_gb: Annotated[
        str | None,
        typer.Option("--disk-gb", help="… of disk; 0: none.", show_default="0, 2 and 8 working sets"),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            help="Price of a GB of device, host memory and disk, with commas.",
            show_default="the profile's, in US dollars",
        ),
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="How many answers to look for, at most.")] = 3,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of each trace, at most.")] = 120,
    seed: Annotated[int, typer.Option(help="How sessions are drawn and laid over one another.")] = 1,
    window: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds in which sessions start.", show_default="so that about 20 are live"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all that was simulated here.", show_default=False)
    ] = None,
) -> None:
    """Which sizes of device memory, host memory and disk meet a target for the time to first token, cheapest first.

    Plays recorded agents against a machine of each size that matters: what misses with more is not tried with less.
    Sizes are an answer if no smaller ones meet the target; each trace has to meet it by itself. Exits with 1 where
    nothing offered does, and shows what comes nearest.

    The rest of the machine stays as the profile has it: more device memory does not compute faster here.
    """
    import sys

    from kvpilot.domain import Tier
    from kvpilot.replay.plan import Hints
    from kvpilot.replay.run import write_json
    from kvpilot.sim import plan_capacity as capacity
    from kvpilot.sim.compare import numbers
    from kvpilot.sim.compare_tiers import hardware_named
    from kvpilot.traces import TraceError, find_traces

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with user_errors(TraceError, ValueError):
        if hints not in [*Hints]:
            raise ValueError(f"--hints {hints}: give none or lifecycle")
        if not 0.0 < ttft_p90 < float("inf"):
            raise ValueError(f"--ttft-p90 {ttft_p90:g}: give seconds above 0")
        hardware = hardware_named(profile)
        offered = {
            tier: numbers(text, option, zero=tier is Tier.DISK)
            for tier, text, option in (
                (Tier.DEVICE, device_gb, "--device-gb"),
                (Tier.HOST, host_gb, "--host-gb"),
                (Tier.DISK, disk_gb, "--disk-gb"),
            )
            if text is not None
        }
        each = (
            numbers(prices, "--prices", zero=True) if prices is not None else list(hardware.prices.values())
        )
        if len(each) != len(hardware.prices):
            raise ValueError(f"--prices {prices}: give one for each of {', '.join(hardware.prices)}")
        asked = capacity.Request(
            hardware=hardware,
            ttft_p90_s=ttft_p90,
            policy=policy,
            hints=Hints(hints),
            gb=offered,
            prices=dict(zip(hardware.prices, each, strict=True)),
            answers=answers,
            sessions=sessions,
            seed=seed,
            window_s=window,
        )
        paths = [path for name in traces for path in find_traces(name)]
        document = capacity.plan_capacity(paths, asked, tell)
    if json_file is not None:
        write_json(json_file, document)
    capacity.print_answers(document, console())
    if not document["answers"]:
        raise typer.Exit(1)
