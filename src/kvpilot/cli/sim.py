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
