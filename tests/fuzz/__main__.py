"""The command; see the head of the package."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from .campaign import Tally, Verdict, input_of, piece
from .corpus import Seed, seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("-n", type=int, default=1000, help="how many inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one input")
    parser.add_argument("--save", type=Path, help="folder for the inputs that are bad")
    parser.add_argument("--show", type=int, metavar="INDEX", help="print one input and exit")
    parser.add_argument("--json", action="store_true", help="end with the counts as JSON")
    arguments = parser.parse_args()
    modules = seeds()
    if arguments.show is not None:
        sys.stdout.buffer.write(input_of(modules, arguments.seed, arguments.show))
        return 0
    tally, began = Tally(), monotonic()
    for verdict in _verdicts(arguments, modules):
        if tally.add(verdict):
            print(f"{verdict.index}: {verdict.outcome}: {verdict.detail}", flush=True)
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                data = input_of(modules, arguments.seed, verdict.index)
                (arguments.save / f"{arguments.seed}_{verdict.index}").write_bytes(data)
        total = sum(tally.outcomes.values())
        if total % 1000 == 0:
            print(f"{total} in {monotonic() - began:.0f} s: {dict(tally.outcomes)}", flush=True)
    print(f"{sum(tally.outcomes.values())} inputs in {monotonic() - began:.0f} s")
    for name, count in (*tally.outcomes.most_common(), *tally.kinds.most_common()):
        print(f"{count:8} {name}")
    if arguments.json:
        print(json.dumps(tally.outcomes))
    return 1 if tally.kinds else 0


def _verdicts(arguments: argparse.Namespace, modules: Sequence[Seed]) -> Iterator[Verdict]:
    indices = range(arguments.first, arguments.first + arguments.n)
    pieces = [indices[start : start + 500] for start in range(0, len(indices), 500)]
    # A function of a module: workers do not find those of a command's.
    work = partial(piece, modules=modules, seed=arguments.seed, limit=arguments.limit)
    if arguments.workers == 1:
        for some in pieces:
            yield from work(some)
        return
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for found in pool.imap(work, pieces):
            yield from found


if __name__ == "__main__":
    sys.exit(main())
