"""`stretto conform`: does an engine keep what stretto and JAX programs rely on?

A line a case, PASS, FAIL or UNSUPPORTED (absent is not broken), then totals. Exit code 0 if nothing failed,
1 if something did, 2 for arguments that cannot be.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from stretto.conformance.cases import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "engine", help="as STRETTO_ENGINE has it: xla:cpu, pjrt:NAME, pjrt:/path/plugin.so, …"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="processes that share the eight devices of each program (1)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        metavar="N",
        help="that the engine has in each process, where these are fewer than programs want: they share them",
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="cases by name: a pattern as of file names, or the beginning of names (programs/psum)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OLD",
        help="show what has changed since this file of --json was written",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="that one case may take before it has failed (60)",
    )
    parser.add_argument(
        "--lines", type=int, default=12, help="of what a failed case says, 0 for all (12)"
    )


def run(arguments: argparse.Namespace) -> int:
    from stretto.conformance import cases

    try:
        old = json.loads(arguments.diff.read_text()) if arguments.diff else None
    except (OSError, ValueError) as error:
        print(f"stretto conform: {arguments.diff} cannot be read: {error}", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    verdicts: list[Verdict] = []
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    try:
        if arguments.devices < 0:
            raise ValueError(f"{arguments.devices} devices: at least one is needed")
        chosen = cases.names_of(arguments.ranks, arguments.only)
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("", total=len(chosen))
            for verdict in cases.conform(
                arguments.engine,
                chosen,
                arguments.ranks,
                arguments.devices,
                lambda name: bar.update(task, completed=len(verdicts), description=name),
                arguments.seconds,
            ):
                verdicts.append(verdict)
                _print(verdict, arguments.lines)
    except (ValueError, FileNotFoundError) as error:
        print(f"stretto conform: {error}", file=sys.stderr)
        return 2
    if not verdicts:
        print(f"stretto conform: no case fits {arguments.only!r}", file=sys.stderr)
        return 2
    report = cases.report(arguments.engine, arguments.ranks, verdicts)
    totals = report["totals"]
    print(", ".join(f"{count} {status}" for status, count in totals.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if old is not None:
        changed = cases.differences(old, report)
        print(
            "\n".join([f"since {arguments.diff}:", *(f"  {c}" for c in changed or ["no change"])])
        )
    return 1 if totals[cases.FAIL] else 0


def _print(verdict: Verdict, lines: int) -> None:
    print(f"{verdict.status:11} {verdict.name}", flush=True)
    if verdict.status == "PASS" or not verdict.text:
        return
    text = [line for line in verdict.text.splitlines() if line.strip()]
    if verdict.status == "UNSUPPORTED":
        text = [verdict.reason()]
    print(textwrap.indent("\n".join(text[-lines:] if lines else text), " " * 12), flush=True)
