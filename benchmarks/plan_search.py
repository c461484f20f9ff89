"""What the search for a plan gains, part by part, beside the plain rule: llama-3-8B steps over 8 x 8 devices.

"The plain rule" keeps the module's order of compute, starts each collective as early as its operands and
memory allow, and awaits it right before its first reader; loops stay as they are. The other columns are the
planner without one of its parts. Figures are predicted milliseconds of a step, by the table beside the
modules.

    python benchmarks/plan_search.py [FILE…]     # default: the modules of the tests
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from stretto.hlo_frontend.compile import explained_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap import apply, staged
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.buckets import Bucketed
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.replay import Phase, Step, replay, unscheduled
from stretto.hlo_frontend.overlap.search import IssueOrder
from stretto.hlo_frontend.source import read_hlo

DATA = Path(__file__).parents[1] / "tests" / "hlo_frontend" / "overlap" / "data"


def plain(graph: Graph, *, launch_s: float = 0.0, memory_limit: float, **_: Any) -> IssueOrder:
    """The plain rule, with the widest window of tasks to look ahead that fits into memory."""
    steps = unscheduled(graph)
    best = IssueOrder(steps, replay(graph, steps, launch_s))
    window = len(graph.tasks)
    while window:
        steps = early_starts(graph, window)
        timeline = replay(graph, steps, launch_s)
        if timeline.peak_bytes <= memory_limit:
            return IssueOrder(steps, timeline) if timeline.seconds < best.timeline.seconds else best
        window //= 2
    return best


def early_starts(graph: Graph, window: int) -> list[Step]:
    """Compute in the module's order, waits late; what is read in the next ``window`` tasks starts at once."""
    tasks = graph.tasks
    steps: list[Step] = []
    done: set[int] = set()
    waiting = [t.index for t in tasks if t.is_collective]

    def finish(index: int) -> None:
        """Await what a task needs."""
        for needed in tasks[index].before:
            if needed not in done and tasks[needed].is_collective:
                if needed in waiting:
                    start(needed)
                steps.append((needed, Phase.WAIT))
                done.add(needed)

    def start(index: int) -> None:
        finish(index)
        waiting.remove(index)
        steps.append((index, Phase.START))

    for task in tasks:
        for index in list(waiting):
            ready = all(b in done for b in tasks[index].before)
            if ready and min(tasks[index].after, default=len(tasks)) <= task.index + window:
                start(index)
        if not task.is_collective:
            finish(task.index)
            steps.append((task.index, Phase.COMPUTE))
            done.add(task.index)
    for index in list(waiting):
        start(index)
    steps += [
        (t.index, Phase.WAIT)
        for t in tasks
        if t.is_collective and t.index not in done and not t.crosses
    ]
    return steps


def no_buckets(graph: Graph, first: IssueOrder, *_: Any) -> Bucketed:
    return Bucketed(graph, first, [(task.index,) for task in graph.tasks])


Patch = tuple[Any, str, Callable[..., Any]]
BUCKETS: list[Patch] = [(module, "bucket", no_buckets) for module in (apply, staged)]
REFINE: list[Patch] = [(m, "refine", lambda graph, found, *_: found) for m in (apply, staged)]
APART: list[Patch] = [(apply, "uncombine", lambda block, costs: None)]
LOOPS: list[Patch] = [(apply, "_stage", lambda block, loop, policy, inner: [])]
PLAIN: list[Patch] = [(module, "search", plain) for module in (apply, staged)]
WITHOUT: dict[str, list[Patch]] = {
    "all": [],
    "plain rule": [*PLAIN, *BUCKETS, *REFINE, *APART, *LOOPS],
    "plain search": PLAIN,
    "no buckets": BUCKETS,
    "no refined buckets": REFINE,
    "no taking apart": APART,
    "no staged loops": LOOPS,
}


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, instead in patches:
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="HLO modules (default: those of the tests)"
    )
    parser.add_argument("--costs", type=Path, default=DATA / "costs_ib.json")
    parser.add_argument("--devices", type=int, default=64, help="where a module does not say it")
    args = parser.parse_args()
    policy = OverlapPolicy(CostTable.read(str(args.costs)))
    shown = Table(title="predicted ms of a step, and seconds that planning took")
    for column in ("module", "floor", *WITHOUT):
        shown.add_column(column)
    for path in args.files or sorted(DATA.glob("*.gz")):
        data = path.read_bytes()
        source = read_hlo(gzip.decompress(data) if path.suffix == ".gz" else data)
        counts = source.counts(args.devices, Module.parse(source.module))
        cells = []
        for patches in WITHOUT.values():
            with patched(patches):
                began = time.process_time()
                found = explained_hlo(source.module, *counts, policy)
                took = time.process_time() - began
            cells.append(f"{found.timeline.seconds * 1e3:.1f} ({took:.1f})")
        shown.add_row(path.name.split(".")[0], f"{found.floor.seconds * 1e3:.1f}", *cells)
    Console(width=200).print(shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
