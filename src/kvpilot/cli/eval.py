"""``kvpilot eval …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors

evaluate = typer.Typer(help="How well kvpilot understands recorded agents.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(evaluate, name="eval", rich_help_panel="Measuring")


@evaluate.command()
def inference(
    traces: Annotated[
        list[str], typer.Argument(help="Trace files or folders, or names below $KVPILOT_TRACES.")
    ],
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Sessions of each trace.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="How sessions are drawn and laid over one another.")] = 0,
    ids: Annotated[
        str, typer.Option(help="Session ids of requests: none, or rotating (new for each).")
    ] = "none",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the scores here.", show_default=False)
    ] = None,
) -> None:
    """Score what is found without hints: sessions, breaks of the prefix, sub-agents, tool and human waits."""
    import sys

    from kvpilot.eval.inference import Ids, print_table, report, score_source
    from kvpilot.replay.run import write_json
    from kvpilot.traces import TraceError, named_traces, read_trace

    with user_errors(TraceError, ValueError):
        kind = Ids(ids)
        scores = {}
        for name, path in named_traces(traces).items():
            print(f"{name}: reading and scoring", file=sys.stderr, flush=True)
            scores[name] = score_source(list(read_trace(path)), seed, kind, sessions)
        document = report(scores, seed, kind)
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())


@evaluate.command()
def forecast(
    traces: Annotated[
        list[str], typer.Argument(help="Trace files or folders, or names below $KVPILOT_TRACES.")
    ],
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Sessions of each trace, at most.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="How sessions are drawn and laid over one another.")] = 1,
    hints: Annotated[str, typer.Option(help="What is known: none, lifecycle.")] = "none",
    prior: Annotated[
        bool, typer.Option("--prior", help="Begin with what is packaged of agents in common.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table here.", show_default=False)
    ] = None,
) -> None:
    """Whether stated intervals of pauses hold: coverage of 50, 80 and 95 % intervals, after a warm-up."""
    import sys

    from kvpilot.eval.forecast import calibrate, print_table, report
    from kvpilot.replay.plan import Hints
    from kvpilot.replay.run import write_json
    from kvpilot.traces import TraceError, named_traces, read_trace

    with user_errors(TraceError, ValueError):
        known = Hints(hints)
        found = {}
        for name, path in named_traces(traces).items():
            print(f"{name}: reading and forecasting", file=sys.stderr, flush=True)
            found[name] = calibrate(list(read_trace(path)), seed, known, sessions, prior)
        document = report(found, seed, known)
    if json_file is not None:
        write_json(json_file, document)
    print_table(document, console())
