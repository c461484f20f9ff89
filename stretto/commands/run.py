"""`stretto run FILE`: run an HLO module on the local devices, or on the ranks of mpirun.

Arguments. ``random:SEED`` gives parameter p of device d what ``numpy.random.default_rng([SEED, p, d])``
draws: standard normal numbers for floating point and complex types (real parts, then imaginary parts), whole
numbers from -8 to 7 for signed integers, 0 to 15 for unsigned ones (within what the type holds), and fair
coins for pred; converted to the parameter's type. It does not depend on how devices are spread over ranks.
``npz:FILE`` gives parameter p the array named ``p``: either of the parameter's shape, the same for all
devices, or with the devices as one more axis in front.

Results. Array ``i`` of the file holds result i of all devices, device by device along the first axis; where
ranks run programs whose results differ in type, arrays are named ``i.d`` for result i of device d.

Collectives run as the file has them. ``--rewrite`` lets them become others that send less, as they do in JAX
programs (`hlo_frontend.passes.bytes`); they keep their names, and counts are those of what runs. ``--costs``
schedules them by a table of costs, as JAX programs are and as ``stretto explain --costs`` says: some may then
run as one. Each rank reads the table.

Counts (``--json``), summed over ranks. ``collectives``: by kind, how often each rank ran one, once for all of
its devices. ``messages``: transfers along a permute's or send's pairs between two different devices;
``skipped``: such transfers outside of the iterations in which their pair is valid. ``bytes``: the payload of
those messages, and what each device gives to other collectives with groups of more than one.
``arithmetic``: arithmetic instructions run, on each device, by segments (see `hlo_frontend.flops`); the
reducers of collectives count as no instructions. ``skipped_runs`` and ``skipped_arithmetic``: runs of
segments, with their instructions, that were not made on a device where nobody reads what they give.
``order``: the collectives of rank 0 by name, in the order in which it first ran them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stretto.collectives.communicator import Array, BoundCollective, Communicator, Reducer, Request
from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.order import CommonOrder, Schedule
from stretto.collectives.types import TensorType
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.plugin import _capi
from stretto.runtime import options
from stretto.runtime.engines.engine import create_engine
from stretto.runtime.errors import CollectiveMismatch, InvalidProgramError, StrettoError
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.value import Value
from stretto.runtime.job import launcher
from stretto.runtime.job.world import World, bootstrap
from stretto.runtime.program import Program
from stretto.runtime.recording import trace
from stretto.runtime.recording.instrument import Instrument, Instruments

from . import check_skips
from .hlo_input import CompiledFile, add_file, compile_file, complain, complain_of_output, read_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument(
        "--arguments",
        default="random:0",
        metavar="SOURCE",
        help="random:SEED, or npz:FILE with arrays 0, 1, … (default: random:0)",
    )
    parser.add_argument("--results", metavar="OUT.npz", help="write the results of all devices")
    parser.add_argument("--json", action="store_true", help="print counts as one JSON object")
    parser.add_argument(
        "--costs",
        metavar="COSTS.json",
        help="schedule by this table of costs (default: STRETTO_COSTS, without which nothing is scheduled)",
    )
    parser.add_argument(
        "--check-skips",
        action="store_true",
        help="also run with nothing left out, and with NaN for what is: results must be equal bit for bit",
    )


def run(arguments: argparse.Namespace) -> int:
    found = launcher.detect()
    ranks = (found.size or 1) if found is not None else 1
    rank = found.rank if found is not None else 0
    compiled: CompiledFile | None = None
    data = b""
    from_first_rank = arguments.file == "-" and ranks > 1
    try:
        devices = options.in_force().local_devices * ranks
        given = Arguments.parse(arguments.arguments)
        costs = arguments.costs or options.in_force().costs
        overlap = OverlapPolicy(CostTable.read(costs)) if costs else None
        if not from_first_rank or rank == 0:
            data = read_file(arguments.file)
            compiled = compile_file(
                data, devices, rewrites=arguments.rewrite, overlap=overlap, rank=rank
            )
            given.check(compiled.program)
            if ranks == 1:
                _make_devices(compiled.program.num_devices)
    except StrettoError as error:
        return complain("run", arguments.file, error)
    world = bootstrap()
    if from_first_rank:
        assert world.comm is not None
        data = world.comm.bcast(data, root=0)
        compiled = compiled or compile_file(
            data,
            devices,
            guarded=False,
            rewrites=arguments.rewrite,
            overlap=overlap,
            rank=rank,
        )
    assert compiled is not None
    try:
        outputs, counts = execute(compiled, world, given)
        problem = _check_skips(data, compiled, world, given) if arguments.check_skips else ""
    except CollectiveMismatch as error:  # every rank has it
        complain("run", arguments.file, error)
        return 1
    except StrettoError as error:
        if world.size > 1:
            raise
        return complain("run", arguments.file, error)
    gathered = [(outputs, counts)]
    if world.comm is not None:
        gathered = world.comm.gather((outputs, counts), root=0) or []
    if problem:
        if world.rank == 0:
            print(f"stretto run: {problem}", file=sys.stderr, flush=True)
        return 1
    if world.rank == 0:
        if arguments.results:
            try:
                np.savez(arguments.results, **stacked([out for out, _ in gathered]))  # type: ignore[arg-type]
            except OSError as error:
                complain_of_output("run", arguments.results, error)
                return 1
        report = total([c for _, c in gathered])
        if arguments.check_skips:
            report["skips_checked"] = True
        print(json.dumps(report) if arguments.json else summary(report), flush=True)
    return 0


def _check_skips(data: bytes, compiled: CompiledFile, world: World, given: Arguments) -> str:
    """What `check_skips.check` finds, on the first rank where it finds something; the same on all ranks."""
    devices = compiled.program.num_devices

    def run(way: check_skips.Variant) -> Outputs:
        variant = compile_file(data, devices, guarded=False, policy=way.policy, rank=world.rank)
        return execute(variant, world, given, way.options)[0]

    problem = check_skips.check(run, compiled.policy, world.options)
    if world.comm is None:
        return problem
    return next(filter(None, world.comm.allgather(problem)), "")


def _make_devices(count: int) -> None:
    """In one process whose number of devices nobody has chosen: as many as the program is for."""
    chosen = options.in_force()
    if chosen.origin("local_devices") == options.DEFAULT:
        options.configure(replace(chosen, local_devices=count))


@dataclass(frozen=True)
class Arguments:
    """Where arguments come from: a seed, or arrays by name."""

    seed: int | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Arguments:
        """Raises `InvalidProgramError` saying what is accepted."""
        kind, _, rest = text.partition(":")
        if kind == "random" and rest.isascii() and rest.isdigit():
            return cls(seed=int(rest))
        if kind == "npz" and rest:
            try:
                with np.load(rest, allow_pickle=False) as file:
                    if not hasattr(file, "files"):
                        raise ValueError("it holds a single array, not an archive")
                    return cls(arrays={name: file[name] for name in file.files})
            except (OSError, ValueError) as error:
                raise InvalidProgramError(f"cannot read arguments from {rest}: {error}") from error
        raise InvalidProgramError(f"--arguments is {text!r}: expected random:SEED or npz:FILE")

    def check(self, program: Program) -> None:
        """Raise `InvalidProgramError` where an argument is missing or does not fit."""
        if self.seed is None:
            for index, type in enumerate(program.inputs):
                self._loaded(index, type, program.num_devices)

    def of(self, index: int, type: TensorType, device: int, num_devices: int) -> np.ndarray:
        """Argument ``index`` of one device, of this type."""
        if self.seed is not None:
            return _random(type, np.random.default_rng([self.seed, index, device]))
        array = self._loaded(index, type, num_devices)
        return array if array.shape == type.shape else array[device]

    def _loaded(self, index: int, type: TensorType, num_devices: int) -> np.ndarray:
        array = self.arrays.get(str(index))
        if array is None:
            raise InvalidProgramError(f"the arguments lack array {index}, which is {type}")
        if array.dtype.kind == "V" and array.dtype.itemsize == type.numpy.itemsize:
            array = array.view(type.numpy)  # numpy's format has no name for the type
        if array.dtype != type.numpy or array.shape not in (type.shape, (num_devices, *type.shape)):
            raise InvalidProgramError(
                f"array {index} of the arguments is {array.dtype}{list(array.shape)}; parameter {index} "
                f"takes {type}, or that with an axis of {num_devices} devices in front"
            )
        return array


def _random(type: TensorType, rng: np.random.Generator) -> np.ndarray:
    dtype, shape = type.numpy, type.shape
    if type.dtype == "pred":
        return rng.integers(0, 2, shape).astype(dtype)
    if type.dtype[0] == "s":
        half = min(8, 1 << (type.element.bits - 1))
        return np.asarray(rng.integers(-half, half, shape)).astype(dtype)
    if type.dtype[0] == "u":
        return np.asarray(rng.integers(0, min(16, 1 << type.element.bits), shape)).astype(dtype)
    numbers = np.asarray(rng.standard_normal(shape))
    if type.dtype[0] == "c":
        numbers = numbers + 1j * np.asarray(rng.standard_normal(shape))
    if type.dtype == "f8e8m0fnu":
        numbers = np.abs(numbers)  # powers of two, without a sign
    return numbers.astype(dtype)


@dataclass
class Counts(Instrument):
    """What this rank has done. Written by the dispatch thread and by streams, one field by one of them.

    ``program`` is the one that runs: the ranks may have agreed on another order than the file's.
    """

    program: Program
    collectives: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    bytes: int = 0
    skipped: int = 0
    arithmetic: int = 0
    skipped_runs: int = 0
    skipped_arithmetic: int = 0
    order: dict[str, None] = field(default_factory=dict)

    def segment_issued(self, program: Program, segment: int, ordinal: int) -> None:
        self.arithmetic += max(self.program.segments[segment].arithmetic, 0)

    def segment_skipped(self, program: Program, segment: int, ordinal: int) -> None:
        self.skipped_runs += 1
        self.skipped_arithmetic += max(self.program.segments[segment].arithmetic, 0)

    def count(
        self,
        collective: Collective,
        operands: Mapping[int, Sequence[Array]],
        skip: frozenset[int] = frozenset(),
    ) -> None:
        """One run of a collective by the local devices that have ``operands``."""
        self.collectives[str(collective.kind)] += 1
        self.order.setdefault(collective.name)
        if collective.kind is Kind.RECV:
            return
        if collective.is_point_to_point:
            for k, (source, target) in enumerate(collective.pairs):
                if source not in operands or source == target:
                    continue
                if k in skip:
                    self.skipped += 1
                else:
                    self.messages += 1
                    self.bytes += sum(t.nbytes for t in collective.operands)
            return
        for device in operands:
            group = collective.group_of.get(device, ())
            if len(group) > 1:
                self.bytes += given_bytes(collective, group, device, operands[device])


def given_bytes(
    collective: Collective, group: tuple[int, ...], device: int, operands: Sequence[Array] = ()
) -> int:
    """Payload bytes that a device gives to the others of its group.

    A root that is computed is taken to be the first member where there are no ``operands`` to tell.
    """
    types = collective.operands
    if collective.kind is Kind.RAGGED_ALL_TO_ALL:
        return types[0].nbytes
    if collective.kind is Kind.BROADCAST:
        root = int(operands[-1].reshape(())) if collective.dynamic_root and operands else 0
        if device != group[root]:
            return 0
        types = collective.results
    return sum(t.nbytes for t in types)


class _CountingBound:
    """A bound collective that counts its runs."""

    def __init__(self, bound: BoundCollective, counts: Counts) -> None:
        self.collective = bound.collective
        self.bytes = getattr(bound, "bytes", 0)
        self.messages = getattr(bound, "messages", 0)
        self._bound = bound
        self._counts = counts

    def run(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> dict[int, list[Array]]:
        self._counts.count(self.collective, operands, skip or frozenset())
        return self._bound.run(operands, skip)

    def start(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> Request:
        self._counts.count(self.collective, operands, skip or frozenset())
        return self._bound.start(operands, skip)


class _CountingCommunicator:
    """A communicator whose collectives are counted."""

    def __init__(self, communicator: Communicator, counts: Counts) -> None:
        self.process = communicator.process
        self.num_processes = communicator.num_processes
        self._communicator = communicator
        self._counts = counts

    def bind(
        self, collective: Collective, owner: Mapping[int, int], reducer: Reducer | None = None
    ) -> BoundCollective:
        return _CountingBound(self._communicator.bind(collective, owner, reducer), self._counts)

    def abort(self, reason: str) -> None:
        self._communicator.abort(reason)

    def close(self) -> None:
        self._communicator.close()


Outputs = dict[int, list[np.ndarray]]


@dataclass(frozen=True)
class _Counted:
    """A program as its module has it, whose orders are counted."""

    program: Program
    schedule: Schedule
    with_order: Callable[[CommonOrder], Program]


def execute(
    compiled: CompiledFile, world: World, given: Arguments, chosen: options.Options | None = None
) -> tuple[Outputs, dict[str, Any]]:
    """Run a program once, under the world's options or those ``chosen``.

    Results by device, for those of this rank, and its counts.
    """
    program = compiled.program
    engine = create_engine(
        world.options.engine, world.local_devices, cores=world.cores, place=world.place
    )
    counts = Counts(program)
    tracing = trace.begin(world, engine, _capi.Rows)
    executor = Executor(
        engine,
        world,
        chosen,
        communicators=lambda stream: _CountingCommunicator(
            create_communicator(world.comm, stream), counts
        ),
        instrument=counts if tracing is None else Instruments(counts, tracing),
    )
    try:

        def counted(
            with_order: Callable[[CommonOrder], Program],
        ) -> Callable[[CommonOrder], Program]:
            def ordered(order: CommonOrder) -> Program:
                counts.program = with_order(order)
                return counts.program

            return ordered

        def as_written() -> _Counted:
            written = compiled.as_written()
            return _Counted(written.program, written.schedule, counted(written.with_order))

        loaded = executor.load(
            program,
            range(program.num_devices),
            schedule=compiled.schedule,
            with_order=counted(compiled.with_order),
            rewritten=compiled.rewritten,
            as_written=as_written,
        )
        rows = [
            [
                _placed(given.of(i, type, device, program.num_devices), type, ordinal, engine)
                for i, type in enumerate(program.inputs)
            ]
            for device, ordinal in loaded.local
        ]
        results = loaded.execute(rows)
        outputs = {
            device: [np.array(value.host_view()) for value in row]
            for (device, _), row in zip(loaded.local, results, strict=True)
        }
    finally:
        executor.close()
    return outputs, {
        "collectives": dict(counts.collectives),
        "messages": counts.messages,
        "bytes": counts.bytes,
        "skipped": counts.skipped,
        "arithmetic": counts.arithmetic,
        "skipped_runs": counts.skipped_runs,
        "skipped_arithmetic": counts.skipped_arithmetic,
        "order": list(counts.order),
    }


def _placed(host: np.ndarray, type: TensorType, ordinal: int, engine: Any) -> Value:
    return Value.of(
        engine,
        engine.put(np.ascontiguousarray(host).reshape(type.shape), type, ordinal),
        type,
        ordinal,
    )


def total(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum over ranks; the order is rank 0's."""
    by_kind: Counter[str] = Counter()
    for one in counts:
        by_kind.update(one["collectives"])
    sums = {k: sum(c[k] for c in counts) for k in counts[0] if k not in ("collectives", "order")}
    return {"collectives": dict(sorted(by_kind.items())), **sums, "order": counts[0]["order"]}


def stacked(outputs: Sequence[Outputs]) -> dict[str, np.ndarray]:
    """Results of all ranks as arrays by name; see the head of this file."""
    by_device = {device: row for out in outputs for device, row in out.items()}
    devices = sorted(by_device)
    signatures = {tuple((a.shape, a.dtype) for a in by_device[d]) for d in devices}
    if len(signatures) > 1:
        return {f"{i}.{d}": array for d in devices for i, array in enumerate(by_device[d])}
    number = len(by_device[devices[0]]) if devices else 0
    return {str(i): np.stack([by_device[d][i] for d in devices]) for i in range(number)}


def summary(report: Mapping[str, Any]) -> str:
    """The counts in a few lines."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["collectives"].items())
    return (
        f"collectives: {kinds or 'none'}\n"
        f"messages: {report['messages']}, skipped: {report['skipped']}, bytes: {report['bytes']}\n"
        f"arithmetic instructions: {report['arithmetic']}, skipped: {report['skipped_arithmetic']} "
        f"in {report['skipped_runs']} runs of segments\n"
        f"order: {' '.join(report['order']) or 'none'}"
        + ("\nnothing that is left out changes a result" if "skips_checked" in report else "")
    )
