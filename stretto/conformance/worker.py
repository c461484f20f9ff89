"""Runs conformance programs in this process and streams what happens to files.

``python -m stretto.conformance.worker LIBRARY OUT SECONDS NAME...``, LIBRARY a module with ``PROGRAMS``,
writes ``OUT/progress.<rank>.jsonl`` (a line when a program starts, one when it ends) and
``OUT/<rank>/<name>.pkl`` with its result. A program that does not end in SECONDS ends the process with
every thread's traceback in ``OUT/stacks.<rank>.txt``: it is known by its missing line.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from .programs.registry import Program


def span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A shard's global index as (start, stop) pairs."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def record(value: Any) -> dict[str, Any]:
    """What the judge needs of one result; copies everything to host memory."""
    if isinstance(value, jax.Array):
        shards = [(span(s.index, value.shape), np.array(s.data)) for s in value.addressable_shards]
        return {"shape": tuple(value.shape), "dtype": str(value.dtype), "shards": shards}
    array = np.asarray(value)
    whole = tuple((0, n) for n in array.shape)
    return {"shape": array.shape, "dtype": str(array.dtype), "shards": [(whole, array)]}


def run(program: Program) -> dict[str, Any]:
    """Run under the program's configuration. Errors in flight surface here, as the copies wait."""
    with jax.enable_x64(program.x64):
        before = jax.config.values["jax_use_shardy_partitioner"]
        jax.config.update("jax_use_shardy_partitioner", program.shardy)
        try:
            return {name: record(value) for name, value in program.run().items()}
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)


def breaks_the_world(error: Exception) -> bool:
    """Whether the ranks may have lost each other: an error of running, not of refusing."""
    refused = ("UNIMPLEMENTED", "INVALID_ARGUMENT")
    failed = isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith(refused)
    return failed and jax.process_count() > 1


def main(library: str, out: Path, seconds: float, names: list[str]) -> None:
    programs = importlib.import_module(library).PROGRAMS
    rank = jax.process_index()
    folder = out / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (out / f"progress.{rank}.jsonl").open("w") as progress,
        (out / f"stacks.{rank}.txt").open("w") as stacks,
    ):
        say(progress, event="ready", devices=len(jax.devices()), processes=jax.process_count())
        for name in names:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
            say(progress, event="start", name=name)
            began, fatal = time.perf_counter(), False
            try:
                result = run(programs[name])
                error = None
                with (folder / f"{name.replace('/', '~')}.pkl").open("wb") as f:
                    pickle.dump(result, f, protocol=5)
            except Exception as e:
                error, fatal = traceback.format_exc(), breaks_the_world(e)
            faulthandler.cancel_dump_traceback_later()
            took = round(time.perf_counter() - began, 4)
            say(progress, event="end", name=name, error=error, fatal=fatal, seconds=took)
            if fatal:
                return
        say(progress, event="done")


def say(stream: TextIO, **fields: Any) -> None:
    stream.write(json.dumps(fields) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
