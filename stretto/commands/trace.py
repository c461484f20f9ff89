"""`stretto trace DIR`: what a job wrote with ``STRETTO_TRACE=DIR``: a Perfetto trace, a page, totals."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.runtime.errors import StrettoError
from stretto.runtime.recording.statistics import Profiled
from stretto.runtime.recording.trace_events import Measured, measure
from stretto.runtime.recording.trace_file import RankTrace, TraceError, read

from .hlo_input import BAD_INPUT
from .trace_chrome import chrome
from .trace_html import page
from .trace_totals import costs_of, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that STRETTO_TRACE named")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        help="write OUT.json and OUT.html; with that ending, only OUT (default: DIR/trace)",
    )
    parser.add_argument(
        "--costs",
        metavar="COSTS.json",
        help="table of costs to predict times by (default: the job's)",
    )
    parser.add_argument("--json", action="store_true", help="print the totals as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    try:
        ranks = [measure(trace) for trace in read_folder(arguments.folder)]
        found = report(ranks, costs_of(ranks, arguments.costs))
        written = _write(arguments, ranks, found)
    except (StrettoError, OSError) as error:
        print(f"stretto trace: {error}", file=sys.stderr)
        return BAD_INPUT
    for warning in found["warnings"]:
        print(f"stretto trace: warning: {warning}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(text(found))
    print(f"written: {', '.join(map(str, written))} (the first opens in https://ui.perfetto.dev)")
    return 0


def read_folder(folder: Path) -> list[RankTrace]:
    """The traces of all ranks of a job, by rank. Raises `TraceError`."""
    if not folder.is_dir():
        raise TraceError(f"{folder} is no folder: name the one that STRETTO_TRACE named")
    traces = [read(path) for path in sorted(folder.glob("rank-*.trace"))]
    if not traces:
        raise TraceError(
            f"{folder} has no trace in it: run the program with STRETTO_TRACE={folder}"
        )
    size = traces[0].header.size
    if len({(t.header.size, t.header.job) for t in traces}) > 1 or len(traces) > size:
        raise TraceError(f"{folder} has traces of several jobs: give every job a folder of its own")
    absent = sorted(set(range(size)) - {t.header.rank for t in traces})
    if absent:
        gone = ", ".join(map(str, absent))
        traces[0].warning = " ".join(
            [traces[0].warning, f"{folder} lacks ranks {gone} of {size}"]
        ).strip()
    return traces


def _write(
    arguments: argparse.Namespace, ranks: list[Measured], found: Mapping[str, Any]
) -> list[Path]:
    out: Path | None = arguments.output
    if out is None:
        if arguments.json:
            return []
        out = arguments.folder / "trace"
    paths = (
        [out] if out.suffix in (".json", ".html") else [Path(f"{out}.json"), Path(f"{out}.html")]
    )
    for path in paths:
        if path.suffix == ".json":
            path.write_text(json.dumps(chrome(ranks)))
        else:
            path.write_text(page(ranks, found), encoding="utf-8")
    return paths


def text(found: Mapping[str, Any]) -> str:
    """The ledger, the most exposed first, and the totals."""
    lines = [f"{'measured':>12} {'predicted':>12} {'exposed':>12} {'calls':>7}  collective"]
    for e in sorted(found["ledger"], key=lambda e: -e["exposed_total"]):
        predicted = "-" if e["predicted"] is None else f"{e['predicted'] * 1e6:.1f} us"
        lines.append(
            f"{e['seconds'] * 1e6:9.1f} us {predicted:>12} {e['exposed'] * 1e6:9.1f} us {e['calls']:7}  "
            f"{e['op']} %{e['name']} of {e['program']} on stream {e['stream']}"
        )
    if found["programs"]:
        lines += ["", *map(_run_line, found["programs"])]
    if found["profiles"]:
        lines += ["", *(str(Profiled(**done)) for done in found["profiles"])]
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"collectives: {kinds or 'none'}",
            f"messages: {found['messages']}, skipped: {found['skipped']}, bytes: {found['bytes']}",
            f"wall {found['wall_ms']:.3f} ms, compute {found['compute_ms']:.3f} ms, communication "
            f"{found['communication_ms']:.3f} ms: exposed {found['exposed_ms']:.3f} ms, overlapped "
            f"{found['overlapped_ms']:.3f} ms (means of {len(found['ranks'])} ranks)",
        ]
    )


def _run_line(p: Mapping[str, Any]) -> str:
    return (
        f"{p['program']}: {p['runs']} runs, predicted {p['predicted_ms']:.3f} ms (exposed "
        f"{p['predicted_exposed_ms']:.3f} ms, held {p['predicted_held_ms']:.3f} ms), measured "
        f"{p['measured_ms']:.3f} ms (exposed {p['measured_exposed_ms']:.3f} ms)"
    )
