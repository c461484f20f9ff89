"""The way into the front end: modules in, programs out.

`compile_stablehlo` takes what JAX hands to a PJRT plugin; `compile_hlo` takes HLO that is partitioned
already. Nothing here touches devices or other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxlib import _jax

from stretto.collectives.order import CommonOrder, Schedule
from stretto.runtime.errors import InvalidProgramError, UnsupportedError
from stretto.runtime.program import Block, Program, Run, Segment
from stretto.runtime.program.check import check

from . import stablehlo, tap
from .carve import BlockPlan, SegmentPlan
from .collective_order import reorder, token_edges
from .graph import Module
from .groups import MOST_DEVICES
from .interleaved import Interleaved, Scheduled
from .local_flow import as_segments
from .lower import lower
from .native import Native, NativePolicy, native
from .overlap.apply import OverlapPolicy, Planned, carve_planned
from .overlap.evaluate import prediction
from .overlap.explained import Explained, explained, floor_as_written
from .overlap.measured import key_of
from .own_options import split
from .passes.bytes import Rewrite, RewriteReport
from .passes.split import Choice, Chosen, digest
from .passes.valid import ValidPolicy, ValidReport
from .pipeline import COMMON, SETTLING, Compilation, Dump, Source, is_checked, policy_for, run
from .plan_text import plan_text
from .reschedule import reschedule
from .schema import HloModuleProto, HloModuleProtoWithConfig
from .text import parse_hlo_text
from .topk import spell_out_topk
from .values import BlockGraph, all_nodes
from .verify import check_partitioned, verify


@dataclass(frozen=True)
class CompileSpec:
    """For how many devices to compile. ``options`` is a serialized ``CompileOptionsProto``."""

    num_replicas: int = 1
    num_partitions: int = 1
    options: bytes = b""


_PROVED = ValidPolicy()


@dataclass(frozen=True)
class PartitionedModule(Source):
    """A partitioned module, and the ways to a program of it."""

    def passed(self) -> tuple[Compilation, BlockPlan]:
        """The module after the passes that all ranks' programs go through, and its graph carved."""
        compilation = Compilation.of(self, Module.parse(self.hlo))
        run(compilation, COMMON)
        assert compilation.carved is not None
        return compilation, compilation.carved

    def lower(
        self,
        module: Module,
        plan: BlockPlan,
        *,
        streams: bool = False,
        homes: dict[SegmentPlan, int] | None = None,
    ) -> Program:
        """The program of a plan, its collectives on one stream or on several. ``homes``: see `lower`."""
        counts = self.num_replicas, self.num_partitions
        return lower(plan, module.name, *counts, _donated(module), streams=streams, homes=homes)

    def with_order(self, order: CommonOrder) -> Program:
        """The program with its collectives in another order. Raises `InvalidProgramError` where that
        contradicts its data or tokens."""
        compilation, plan = self.passed()
        reorder(compilation.entry, plan, order)
        plan = carve_planned(compilation.entry, None, self.ordered)
        return self.lower(compilation.module, plan)

    def tokens(self) -> dict[str, tuple[str, ...]]:
        """By name of each collective, those that tokens put right before it."""
        compilation, plan = self.passed()
        return token_edges(compilation.entry, plan)

    def key(self) -> str:
        """By what measured times of its compute are kept (see `overlap.measured`)."""
        return key_of(Module.parse(self.hlo), self.num_replicas, self.num_partitions)

    def explained(self, overlap: OverlapPolicy, parsed: Module | None = None) -> Explained:
        """How the collectives of the program are scheduled that `compiled` makes with this policy.
        ``parsed`` is the module, if the caller has it."""
        module = parsed or Module.parse(self.hlo)
        c = Compilation.of(self, module, _donated(module), overlap)
        run(c, SETTLING)
        policy = policy_for(self, c.module, overlap)
        found = explained(c.entry, policy, c.donated, c.ordered, pipeline=self.valid.pipeline)
        found.splits = c.splits.told
        if c.splits.decisions:
            found.unsplit_floor = floor_as_written(c.unsplit(), policy, c.donated)
        return found

    def lowered(
        self, overlap: OverlapPolicy | None = None, dump: Dump | None = None
    ) -> LoweredModule:
        """The program with all that it came of. ``overlap``: how its collectives are scheduled. ``dump`` is
        given what it was at each stage."""
        module = Module.parse(self.hlo)
        c = Compilation.of(self, module, _donated(module), overlap)
        run(c, dump=dump)
        assert c.carved is not None
        planned = c.planned is not None and c.planned.changed
        homes: dict[SegmentPlan, int] = {}
        own = [node.collective for node in all_nodes(c.entry) if self.starts and node.is_started]
        started = frozenset(collective.name for collective in own if collective is not None)
        program = self.lower(module, c.carved, streams=planned or bool(own), homes=homes)
        if c.planned is not None:
            program = replace(program, predicted=prediction(c.planned))
        if dump is not None:
            if c.planned is not None:
                dump(module.name, "plan", plan_text(c.planned))
            _dump_program(program, dump)
        if is_checked():
            check(program)
        return LoweredModule(
            program, c.entry, c.carved, homes, c.schedule, c.valid, c.rewritten, c.planned, c.splits,
            started,
        )  # fmt: skip

    def compiled(
        self, overlap: OverlapPolicy | None = None, dump: Dump | None = None
    ) -> CompiledModule:
        """The program, and what was found about it. ``overlap``, ``dump``: as in `lowered`."""
        made = self.lowered(overlap, dump)
        decided = made.splits.decisions
        return CompiledModule(
            made.program,
            replace(self, splits=decided),
            ("",) * len(made.program.inputs),
            ("",) * len(made.program.outputs),
            made.schedule,
            made.valid,
            made.rewritten.rewrites,
            made.rewritten.digest + digest(decided),
            made.overlap,
            splits=made.splits.told,
            started=made.started,
        )


@dataclass(frozen=True, eq=False)
class LoweredModule:
    """A program, and what it was lowered from: the entry as a graph, as it was rewritten, ordered and carved.

    ``homes``: which segment of the program each one of ``carved`` became. ``started``: names of the
    collectives that the program itself starts and awaits. The rest as in `CompiledModule`.
    """

    program: Program
    entry: BlockGraph
    carved: BlockPlan
    homes: dict[SegmentPlan, int]
    schedule: Schedule
    valid: ValidReport
    rewritten: RewriteReport
    overlap: Planned | None
    splits: Choice
    started: frozenset[str]


@dataclass(frozen=True)
class CompiledModule:
    """A program, and what a PJRT executable has to tell about itself.

    ``source`` is what it was lowered from, None for a program of one segment, which is the module as it
    came. Memory kinds are empty strings where the program names none. ``schedule`` is what the program
    communicates, in its order. ``valid`` tells what was found about transfers in loops, ``rewrites`` what
    became of collectives (see `passes.bytes`), ``splits`` what was decided of those that could be split (see
    `passes.split`); ``rewritten`` is a digest of both, empty if nothing changed.
    ``overlap`` is what was planned to hide communication, where that was asked for and there is some; the
    program that ``with_order`` gives goes without.
    ``interleaved`` tells what became of pipelines that were to be interleaved (see `interleaved`).
    ``walked`` says of control flow that communicates, by name, why it is no segment that calls its
    collectives, where segments might (see `native`). ``started``: names of the collectives that the program
    itself starts and awaits.
    Layouts are what the caller is told, from minor to major; empty ones are row-major, and if all are there
    are none.
    """

    program: Program
    source: PartitionedModule | None = None
    input_memory_kinds: tuple[str, ...] = ()
    output_memory_kinds: tuple[str, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    valid: ValidReport = field(repr=False, default_factory=ValidReport)
    rewrites: tuple[Rewrite, ...] = ()
    rewritten: bytes = b""
    overlap: Planned | None = field(repr=False, default=None)
    interleaved: tuple[Interleaved | Scheduled, ...] = ()
    walked: tuple[tuple[str, str], ...] = ()
    splits: tuple[Chosen, ...] = ()
    started: frozenset[str] = frozenset()
    input_layouts: stablehlo.Layouts = ()
    output_layouts: stablehlo.Layouts = ()

    def hlo_with_config(self, hlo: bytes = b"") -> bytes:
        """A serialized ``HloModuleProtoWithConfig`` of the whole program for one device: entry layout,
        counts, shardings of parameters and result. ``hlo``: the module, if it is to be another one than was
        given to the engine."""
        return _with_config(self, hlo or self._hlo())

    def _hlo(self) -> bytes:
        if self.source is not None:
            return self.source.hlo
        (segment,) = self.program.segments
        computation = _jax.mlir.mlir_module_to_xla_computation(segment.module, False, False)
        return computation.as_serialized_hlo_module_proto()

    def with_order(self, order: CommonOrder) -> Program:
        """The program with its collectives in another order. Raises `InvalidProgramError` where that
        contradicts its data or tokens."""
        if self.source is None:
            raise InvalidProgramError("the program has no collectives to order")
        return self.source.with_order(order)

    def as_walked(self) -> CompiledModule:
        """The same module where compiled code calls no collectives, and nothing is planned. Of modules that
        were partitioned."""
        assert self.source is not None
        return self.source.compiled()

    def as_written(self) -> CompiledModule:
        """The same module with its collectives as they are written."""
        if self.source is None or not (self.source.rewrites or self.source.splits):
            return self
        return replace(self.source, rewrites=False, splits=()).compiled()

    def tokens(self) -> dict[str, tuple[str, ...]]:
        """By name of each collective, those that tokens put right before it."""
        return {} if self.source is None else self.source.tokens()


def compile_stablehlo(
    module: bytes | str,
    spec: CompileSpec,
    *,
    pseudo_tokens: bool = True,
    rewrites: bool = True,
    valid: ValidPolicy = _PROVED,
    overlap: OverlapPolicy | None = None,
    interleave: int = 1,
    schedule: str = "gpipe",
    splits: bool = False,
    calls: NativePolicy | None = None,
    dump: Dump | None = None,
) -> CompiledModule:
    """Partition and lower StableHLO (text, bytecode, portable artifact).

    ``pseudo_tokens``: whether scalars that only order collectives become order (see
    `passes.pseudo_tokens`). ``rewrites``: whether collectives may become others that send less (see
    `passes.bytes`). ``valid``: how iterations are found in which transfers are made (see
    `passes.valid`). ``overlap``: how collectives are scheduled beside compute (see `overlap.apply`); None
    where they are not. ``interleave``: chunks of layers that each device of a pipeline is to have (see
    `pipelines`), and ``schedule`` the order in which stages run them forwards and backwards, where the
    compile options do not say it. ``splits``: whether collectives may be split into parts where the table
    of costs has it pay (see `passes.split`), likewise. ``calls``: where segments may call
    collectives themselves (see `native`); None if nowhere. ``dump`` is given what the program was at each
    stage. Raises `InvalidProgramError` or `UnsupportedError`.
    """
    if spec.num_replicas < 1 or spec.num_partitions < 1:
        raise InvalidProgramError(
            f"a program needs at least one replica and one partition, not {spec.num_replicas} "
            f"and {spec.num_partitions}"
        )
    own, options, names_xla = split(spec.options)
    with stablehlo.parsed(module) as parsed:
        if dump is not None:
            dump(stablehlo.signature(parsed, types=False).name, "stablehlo", str(parsed))
        stablehlo.replace_boundary_tokens(parsed)
        input_layouts, output_layouts = stablehlo.settle_layouts(parsed)
        single = spec.num_replicas * spec.num_partitions == 1
        if single and not names_xla and stablehlo.is_local(parsed):
            whole = _whole(parsed)  # options of XLA are XLA's to check and to follow
            if dump is not None:
                _dump_program(whole.program, dump)
            return replace(whole, input_layouts=input_layouts, output_layouts=output_layouts)
        stablehlo.inline_late_calls(parsed)
        stablehlo.call_decompositions(parsed)
        signature = stablehlo.signature(parsed, types=False)
        hlo = tap.optimized_hlo(parsed, spec.num_replicas, spec.num_partitions, options)
    counts = spec.num_replicas, spec.num_partitions
    finite = valid.finite_padding if own.finite_padding is None else own.finite_padding
    hlo, found = reschedule(
        hlo, *counts, own.interleave or interleave, own.schedule or schedule, dump,
        finite_padding=finite, named=bool(own.interleave or own.schedule),
    )  # fmt: skip
    chunked = splits if own.split is None else own.split
    decided = None if chunked else ()
    partitioned = PartitionedModule(
        hlo, *counts, pseudo_tokens, valid, rewrites, starts=True, splits=decided
    )
    compiled = partitioned.compiled(overlap, dump)
    program = as_segments(compiled.program)
    made = Native(program)
    if calls is not None and program.communicates:
        made = native(program, calls, compiled.started)
    if dump is not None and (made.regions or program is not compiled.program):
        _dump_program(made.program, dump)
    if is_checked():
        check(made.program)
    compiled = replace(compiled, program=made.program, walked=made.refused)
    return replace(
        compiled,
        input_memory_kinds=_padded(signature.input_memory_kinds, len(compiled.program.inputs)),
        output_memory_kinds=_padded(signature.output_memory_kinds, len(compiled.program.outputs)),
        interleaved=found,
        input_layouts=_settled(input_layouts, len(compiled.program.inputs)),
        output_layouts=_settled(output_layouts, len(compiled.program.outputs)),
    )


def _settled(layouts: stablehlo.Layouts, count: int) -> stablehlo.Layouts:
    if any(layouts) and len(layouts) != count:
        raise UnsupportedError("a program with tokens among its results cannot choose layouts")
    return layouts if any(layouts) else ()


def compile_hlo(
    hlo: bytes | str,
    num_replicas: int,
    num_partitions: int,
    *,
    pseudo_tokens: bool = True,
    rewrites: bool = False,
    valid: ValidPolicy = _PROVED,
    overlap: OverlapPolicy | None = None,
    interleave: int = 1,
    schedule: str = "gpipe",
    splits: bool = False,
    dump: Dump | None = None,
) -> CompiledModule:
    """Lower HLO that is partitioned already: text, or a serialized ``HloModuleProto``.

    Its collectives run as they are written, unless ``rewrites`` or ``splits`` is set. The rest as in
    `compile_stablehlo`. Raises `InvalidProgramError` where it contradicts itself, `UnsupportedError`.
    """
    counts = num_replicas, num_partitions
    module, _, found = _partitioned(
        hlo, *counts, pseudo_tokens, rewrites, valid, (interleave, schedule), splits, dump
    )
    return replace(module.compiled(overlap, dump), interleaved=found)


def explained_hlo(
    hlo: bytes | str,
    num_replicas: int,
    num_partitions: int,
    overlap: OverlapPolicy,
    *,
    pseudo_tokens: bool = True,
    rewrites: bool = False,
    valid: ValidPolicy = _PROVED,
    interleave: int = 1,
    schedule: str = "gpipe",
    splits: bool = False,
    parsed: Module | None = None,
) -> Explained:
    """The plan of the program that `compile_hlo` makes of the same arguments, which raises the same.

    ``parsed`` is the module of ``hlo``, if the caller has it.
    """
    counts = num_replicas, num_partitions
    module, parsed, _ = _partitioned(
        hlo, *counts, pseudo_tokens, rewrites, valid, (interleave, schedule), splits, parsed=parsed
    )
    return module.explained(overlap, parsed)


def _partitioned(
    hlo: bytes | str,
    num_replicas: int,
    num_partitions: int,
    pseudo_tokens: bool,
    rewrites: bool,
    valid: ValidPolicy,
    chosen: tuple[int, str],
    splits: bool,
    dump: Dump | None = None,
    parsed: Module | None = None,
) -> tuple[PartitionedModule, Module, tuple[Interleaved | Scheduled, ...]]:
    """HLO that somebody hands in, verified, its pipelines interleaved; the same parsed; and what became of
    the pipelines."""
    if num_replicas < 1 or num_partitions < 1:
        raise InvalidProgramError("a program needs at least one replica and one partition")
    if num_replicas * num_partitions > MOST_DEVICES:
        raise InvalidProgramError(
            f"the program is for {num_replicas} replicas of {num_partitions} partitions; there are at most "
            f"{MOST_DEVICES} devices"
        )
    serialized = parse_hlo_text(hlo) if isinstance(hlo, str) else hlo
    parsed = parsed or Module.parse(serialized)
    verify(parsed)
    check_partitioned(parsed, num_partitions)
    counts = num_replicas, num_partitions
    made, found = reschedule(
        spell_out_topk(serialized), *counts, *chosen, dump, finite_padding=valid.finite_padding
    )
    if made is not serialized:
        parsed = Module.parse(made)
    decided = None if splits else ()
    module = PartitionedModule(made, *counts, pseudo_tokens, valid, rewrites, splits=decided)
    return module, parsed, found


def _dump_program(program: Program, dump: Dump) -> None:
    """The program, and the modules of its segments, which `str` names by size and digest alone."""
    dump(program.name, "program", str(program))
    texts = []
    for i, segment in enumerate(program.segments):
        with stablehlo.parsed(segment.module) as parsed:
            texts.append(f"// segment {i}: {segment.name}\n{parsed}\n")
    dump(program.name, "segments", "\n".join(texts))


def _padded(kinds: tuple[str, ...], count: int) -> tuple[str, ...]:
    return kinds if len(kinds) == count else ("",) * count


def _whole(parsed: stablehlo.ir.Module) -> CompiledModule:
    """A program of one segment: the module as it came."""
    signature = stablehlo.signature(parsed)
    code = stablehlo.for_engine(parsed)
    segment = Segment(
        signature.inputs, signature.outputs, code, signature.donated, name=signature.name
    )
    num_inputs = len(signature.inputs)
    slots = tuple(range(num_inputs + len(signature.outputs)))
    inputs, outputs = slots[:num_inputs], slots[num_inputs:]
    program = Program(
        name=signature.name,
        num_replicas=1,
        num_partitions=1,
        slot_types=signature.inputs + signature.outputs,
        segments=(segment,),
        collectives=(),
        body=Block(inputs, (Run(0, inputs, outputs, signature.donated),), outputs),
        donated=signature.donated,
    )

    return CompiledModule(
        program,
        input_memory_kinds=signature.input_memory_kinds,
        output_memory_kinds=signature.output_memory_kinds,
    )


def _donated(module: Module) -> tuple[int, ...]:
    """Positions of flattened inputs that the caller gives up: those aliased to outputs.

    XLA has made aliases of the donors that fit an output; the others stay the caller's, as on JAX's own
    CPU backend.
    """
    entries = module.proto.input_output_alias.entries
    donated = {(e.parameter_number, tuple(e.parameter_shape_index)) for e in entries}
    if not donated:
        return ()
    positions: dict[tuple[int, tuple[int, ...]], int] = {}
    for parameter in module.entry.parameters:
        for path in _array_paths(parameter.shape, ()):
            positions[parameter.proto.parameter_number, path] = len(positions)
    return tuple(sorted(positions[key] for key in donated if key in positions))


def _array_paths(shape: object, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    from .schema import TOKEN, TUPLE

    if shape.element_type == TUPLE:  # type: ignore[attr-defined]
        parts = enumerate(shape.tuple_shapes)  # type: ignore[attr-defined]
        return [p for i, part in parts for p in _array_paths(part, (*path, i))]
    return [] if shape.element_type == TOKEN else [path]  # type: ignore[attr-defined]


def _with_config(compiled: CompiledModule, serialized: bytes) -> bytes:
    num_replicas, num_partitions = compiled.program.num_replicas, compiled.program.num_partitions
    wrapped = HloModuleProtoWithConfig()
    wrapped.hlo_module.CopyFrom(HloModuleProto.FromString(serialized))
    layout = wrapped.config.entry_computation_layout
    layout.CopyFrom(wrapped.hlo_module.host_program_shape)
    _set_layouts(layout.parameters, compiled.input_layouts)
    _set_layouts([layout.result], compiled.output_layouts)
    wrapped.config.replica_count = num_replicas
    wrapped.config.num_partitions = num_partitions
    wrapped.config.use_spmd_partitioning = num_partitions > 1
    return wrapped.SerializeToString()


def _set_layouts(shapes: Sequence[Any], layouts: stablehlo.Layouts) -> None:
    """Give the arrays of ShapeProtos the layouts that the caller is told; XLA prefers others for some."""
    arrays = [leaf for shape in shapes for leaf in _leaves(shape)]
    if not layouts or len(layouts) != len(arrays):
        layouts = ((),) * len(arrays)
    for shape, layout in zip(arrays, layouts, strict=True):
        shape.layout.minor_to_major[:] = layout or range(len(shape.dimensions) - 1, -1, -1)


def _leaves(shape: Any) -> list[Any]:
    """The ShapeProtos with layouts in one that may be a tuple."""
    if shape.tuple_shapes:
        return [leaf for part in shape.tuple_shapes for leaf in _leaves(part)]
    return [shape] if shape.HasField("layout") else []
