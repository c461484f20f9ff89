"""`stretto explain FILE`: what a module would communicate, in which order and why, without running it."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.collectives.ops import Collective
from stretto.collectives.order import Schedule, certificate
from stretto.collectives.types import TensorType
from stretto.hlo_frontend.collectives import NEVER
from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.interleaved import Scheduled
from stretto.hlo_frontend.iterations import LAST
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.runtime.errors import StrettoError
from stretto.runtime.options import in_force
from stretto.runtime.program import Loop, Program, Run, Start, instructions
from stretto.runtime.program.work import work

from .explain_costs import ledger_text, schedule_file
from .hlo_input import CompiledFile, add_file, compile_file, complain, complain_of_output, read_file
from .schedule_svg import svg

MOST_CELLS, MOST_ROWS = 120, 32  # iterations and devices of the picture of a loop
MOST = 10  # collectives printed without --all
MOST_GROUPS = 4  # groups and pairs printed of one collective; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"print all collectives, not only the {MOST} with most bytes",
    )
    parser.add_argument(
        "--costs",
        metavar="COSTS.json",
        help="schedule by this table of costs, and print what each collective costs and what hides it",
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="print the program that the module compiles to; with --costs, as it is scheduled by the table",
    )
    parser.add_argument(
        "--svg", metavar="OUT.svg", help="draw the loops, devices x iterations, into this file"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        devices = in_force().local_devices
        if arguments.costs:
            if arguments.program:
                policy = OverlapPolicy(CostTable.read(arguments.costs))
                made = compile_file(
                    read_file(arguments.file), devices, rewrites=arguments.rewrite, overlap=policy
                )
                return _print_program(made.program, arguments.json)
            found = schedule_file(
                read_file(arguments.file), arguments.costs, devices, rewrites=arguments.rewrite
            )
            print(found if arguments.json else ledger_text(json.loads(found)))
            return 0
        compiled = compile_file(read_file(arguments.file), devices, rewrites=arguments.rewrite)
    except StrettoError as error:
        return complain("explain", arguments.file, error)
    explanation = explain(compiled)
    if arguments.svg:
        loops = explanation["loops"]
        try:
            Path(arguments.svg).write_text(svg(loops, [loop_lines(e)[0] for e in loops]), "utf-8")
        except OSError as error:
            return complain_of_output("explain", arguments.svg, error)
    if arguments.program:
        return _print_program(compiled.program, arguments.json)
    most = None if arguments.all else MOST
    print(json.dumps(explanation, indent=2) if arguments.json else to_text(explanation, most))
    return 0


def _print_program(program: Program, as_json: bool) -> int:
    text = str(program)
    print(json.dumps({"program": text}, indent=2) if as_json else text.rstrip("\n"))
    return 0


def explain(compiled: CompiledFile) -> dict[str, Any]:
    """What there is to say about a file's program, as JSON."""
    return explain_program(compiled, compiled.tokens)


def explain_program(
    compiled: CompiledFile | CompiledModule, tokens: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    """What there is to say about a program, as JSON. ``tokens``: by name of each collective, those that
    tokens put before it."""
    program = compiled.program
    # The first of each name: others are what it is in stretches of iterations.
    by_name = {(c.name, str(c.kind)): c for c in reversed(program.collectives)}
    later = _awaited_later(program)
    called = {program.collectives[i].name for s in program.segments for i in s.sites}
    scheduled = {s.loop: s for s in compiled.interleaved if isinstance(s, Scheduled)}
    return {
        "name": program.name,
        "replicas": program.num_replicas,
        "partitions": program.num_partitions,
        "inputs": [str(t) for t in program.inputs],
        "outputs": [str(t) for t in program.outputs],
        "certificate": certificate(compiled.schedule).hex(),
        "segments": sum(isinstance(i, Run) for i in instructions(program.body)),
        "distinct_segments": len(program.segments),
        "order": [e.name for e in compiled.schedule.walk() if (e.name, e.kind) in by_name],
        "collectives": [
            entry
            | ({"awaited": "next iteration"} if entry["name"] in later else {})
            | ({"called_by": "compiled code"} if entry["name"] in called else {})
            for entry in _entries(compiled.schedule, by_name, tokens, [])
        ],
        "compute": asdict(work(program)),
        "loops": [asdict(loop) | _runs(scheduled.get(loop.name)) for loop in compiled.valid.loops],
        "interleaved": [asdict(i) | {"text": i.describe()} for i in compiled.interleaved],
        "rewrites": [asdict(rewrite) for rewrite in compiled.rewrites],
        "splits": [asdict(c) | {"text": c.describe()} for c in getattr(compiled, "splits", ())],
        "walked": dict(getattr(compiled, "walked", ())),
    }


def _runs(scheduled: Scheduled | None) -> dict[str, Any]:
    """What devices do in the loop of a schedule; no other loop has ``runs``."""
    if scheduled is None:
        return {"runs": ()}
    return {
        "runs": scheduled.runs,
        "microbatches": scheduled.numbers,
        "chunks": scheduled.own_chunks,
    }


def _awaited_later(program: Program) -> set[str]:
    """Names of the collectives that are awaited in the iteration after that which starts them."""
    found = list(instructions(program.body))
    events = {c.event for i in found if isinstance(i, Loop) for c in i.carried}
    starts = [i for i in found if isinstance(i, Start) and i.event in events]
    return {program.collectives[i.collective].name for i in starts}


def _entries(
    schedule: Schedule,
    by_name: dict[tuple[str, str], Collective],
    tokens: dict[str, tuple[str, ...]],
    within: list[str],
) -> Iterator[dict[str, Any]]:
    for entry in schedule.entries:
        common = {
            "name": entry.name,
            "kind": entry.kind,
            "within": list(within),
            "after": [schedule.entries[i].name for i in entry.after],
            "tokens": list(tokens.get(entry.name, ())),
            "source": entry.source,
        }
        collective = by_name.get((entry.name, entry.kind))
        if collective is not None:
            yield common | _facts(collective)
            continue
        yield common | {"trip_count": entry.trip_count}
        for child in entry.children:
            yield from _entries(child, by_name, tokens, [*within, entry.name])


def _facts(collective: Collective) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "operands": [str(t) for t in collective.operands],
        "results": [str(t) for t in collective.results],
        "bytes": payload_bytes(collective),
    }
    if collective.is_point_to_point:
        facts["pairs"] = collective.pairs
    else:
        facts["groups"] = collective.groups
    if collective.valid_iterations:
        facts["valid_iterations"] = collective.valid_iterations
    if collective.reduction is not None or collective.reducer is not None:
        facts["reducer"] = str(collective.reduction or "computation")
    if collective.dimension >= 0:
        facts["dimension"] = collective.dimension
    if collective.channel:
        facts["channel"] = collective.channel
    return facts


def payload_bytes(collective: Collective) -> int:
    """Bytes that one device gives; takes, for a receive."""
    types: tuple[TensorType, ...] = collective.operands or collective.results
    return sum(t.nbytes for t in types)


def to_text(explanation: dict[str, Any], most: int | None = None) -> str:
    """The explanation for reading, one line for each collective in its order.

    Where there are more than ``most``, their totals and those that give most bytes.
    """
    e = explanation
    devices = e["replicas"] * e["partitions"]
    lines = [
        f"program {e['name']}: {devices} devices ({e['replicas']} replicas x {e['partitions']} "
        f"partitions), {len(e['order'])} collectives, {e['segments']} segments "
        f"({e['distinct_segments']} distinct)",
        f"certificate {e['certificate']}",
    ]
    lines += _collectives(e["collectives"], most)
    if e["compute"]["skipped_runs"]:
        c = e["compute"]
        share = c["skipped_flops"] / c["flops"] if c["flops"] else 0.0
        lines.append(
            f"{c['skipped_runs']} of {c['runs']} runs of segments, with {share:.0%} of the arithmetic, are "
            "left out on devices where nobody reads what they give"
        )
    ways = Counter(e.get("ways", {}).values())
    if ways:
        counts = ", ".join(f"{count} {way}" for way, count in ways.items())
        lines.append(f"collectives of GPUs' arrays: {counts}")
    lines += [f"%{name} is walked by the executor: {why}" for name, why in e["walked"].items()]
    lines += [found["text"] for found in e["interleaved"]]
    for loop in e["loops"]:
        lines += loop_lines(loop)
    for split in e["splits"]:
        where = f" at {split['source']}" if split["source"] else ""
        lines.append(f"%{split['name']}{where} {split['text']}")
    for rewrite in e["rewrites"]:
        where = f" at {rewrite['source']}" if rewrite["source"] else ""
        lines.append(f"rewritten: %{rewrite['name']} {rewrite['said']}{where}")
    return "\n".join(lines)


def _collectives(entries: list[dict[str, Any]], most: int | None) -> list[str]:
    """A line for each collective and loop around one, or the totals and the ``most`` that give most bytes."""
    count = sum("bytes" in c for c in entries)
    if most is None or count <= most:
        return [
            "  " * (1 + len(c["within"])) + f"{number}: {_line(c)}"
            for number, c in enumerate(entries)
        ]
    trips = {c["name"]: c.get("trip_count") for c in entries if "bytes" not in c}
    times = [math.prod(trips[name] or 1 for name in c["within"]) for c in entries]
    totals: dict[str, list[int]] = {}
    for c, n in zip(entries, times, strict=True):
        if "bytes" in c:
            total = totals.setdefault(c["kind"], [0, 0, 0])
            total[:] = total[0] + 1, total[1] + n, total[2] + n * c["bytes"]
    lines = [
        f"  {kind}: {written} in the program, {run} times in a run, {size} bytes from each device"
        for kind, (written, run, size) in sorted(totals.items(), key=lambda item: -item[1][2])
    ]
    if None in trips.values():
        lines.append("  (loops whose number of iterations is not known count as one)")
    lines.append(f"the {most} with most bytes in a run; --all prints all {count}, in their order:")
    order = sorted(range(len(entries)), key=lambda i: -times[i] * entries[i].get("bytes", -1))
    for i in order[:most]:
        within = "".join(f" in %{name}" for name in entries[i]["within"])
        often = f" {times[i]} times" if times[i] != 1 else ""
        lines.append(f"  {i}: {_line(entries[i])}{within}{often}")
    return lines


def _line(c: dict[str, Any]) -> str:
    if "bytes" not in c:
        count = c["trip_count"]
        times = f" {count} times" if count is not None else ""
        return f"{c['kind']} %{c['name']}{times}{_reasons(c)}"
    types = f"({', '.join(c['operands'])}) -> ({', '.join(c['results'])})"
    sets = c.get("groups", c.get("pairs", ()))
    shown = ", ".join("{" + ",".join(map(str, s)) + "}" for s in sets[:MOST_GROUPS])
    if len(sets) > MOST_GROUPS:
        shown += f", … {len(sets) - MOST_GROUPS} more"
    what = "groups" if "groups" in c else "pairs"
    extras = "".join(f" {k} {c[k]}" for k in ("reducer", "dimension", "channel") if k in c)
    if "valid_iterations" in c:
        extras += " valid " + ",".join(map(spelled, c["valid_iterations"]))
    if "awaited" in c:
        extras += f" awaited in the {c['awaited']}"
    if "called_by" in c:
        extras += f" called by {c['called_by']}"
    return (
        f"{c['kind']} %{c['name']} {types}{extras} {what} [{shown}] {c['bytes']} bytes{_reasons(c)}"
    )


def loop_lines(loop: dict[str, Any]) -> list[str]:
    """A loop with transfers: what of them is sent, and devices x iterations, hollow where nobody reads.

    In the loop of a schedule runs forwards are F, backwards B, and of gradients of weights W.
    """
    name = f"loop %{loop['name']}{' at ' + loop['source'] if loop['source'] else ''}"
    if loop["why"]:
        return [
            f"{name}: transfers are made in every iteration unless they are never read: {loop['why']}"
        ]
    lines = [
        f"{name}: {loop['sent']} of {loop['transfers']} messages are sent in {loop['trips']} iterations, "
        f"{loop['idle']:.0%} of the arithmetic is read by nobody"
    ]
    rows = loop.get("runs") or [
        "".join("■" if busy else "□" for busy in row) for row in loop["busy"]
    ]
    if not rows or loop["trips"] > MOST_CELLS:
        return lines
    lines += [f"  {device:>4} {row}" for device, row in enumerate(rows[:MOST_ROWS])]
    if len(rows) > MOST_ROWS:
        lines.append(f"       … {len(rows) - MOST_ROWS} more devices")
    return lines


def spelled(bounds: tuple[int, ...]) -> str:
    """Valid iterations for reading: ``0:3+7:8``, ``never``."""
    if bounds == NEVER:
        return "never"
    runs = zip(bounds[::2], bounds[1::2], strict=True)
    return "+".join(f"{lo}:{'' if hi == LAST else hi}" for lo, hi in runs)


def _reasons(c: dict[str, Any]) -> str:
    text = ""
    by_data = [name for name in c["after"] if name not in c["tokens"]]
    if by_data:
        text += " after " + ", ".join(f"%{name}" for name in by_data)
    if c["tokens"]:
        text += " tokens from " + ", ".join(f"%{name}" for name in c["tokens"])
    return text + (f" at {c['source']}" if c["source"] else "")
