"""Collective instructions to `Collective` data: kind, groups, dimensions, reducers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

from .graph import Computation, Instruction
from .groups import parse_pairs, replica_groups, source_target_pairs, spelled_groups

PAIRS_ATTRIBUTE = "_xla_send_recv_source_target_pairs"
VALIDATION_ATTRIBUTE = "_xla_send_recv_validation"

NEVER = (1, 0)


def validation_text(instruction: Instruction, wrappers: Sequence[Instruction]) -> str | None:
    """The text of the attribute of valid iterations, on an op, its done, or the async ops around it.

    Raises `InvalidProgramError` if several of these have it and differ.
    """
    found: str | None = None
    starts = [instruction, *wrappers]
    dones = [start.computation.dones.get(start) for start in starts]
    for place in [*starts, *(done for done in dones if done is not None)]:
        text = place.attributes.get(VALIDATION_ATTRIBUTE)
        if text is None:
            continue
        if found is not None and text.split() != found.split():
            raise instruction.invalid(
                f"{VALIDATION_ATTRIBUTE} is {found} on it or its start, and {text} on {place.name}"
            )
        found = text
    return found


class CollectiveReader:
    """Reads collectives of a program for given numbers of replicas and partitions."""

    def __init__(self, num_replicas: int, num_partitions: int) -> None:
        self.num_replicas = num_replicas
        self.num_partitions = num_partitions

    def read(
        self,
        instruction: Instruction,
        operands: Sequence[TensorType],
        results: Sequence[TensorType],
        *,
        validation: str | None = None,
    ) -> tuple[Collective, Computation | None]:
        """The collective, and its reducer if that has no native form.

        ``operands`` and ``results`` are the instruction's arrays, without tokens. ``validation`` is the
        text of its valid iterations (see `validation_text`).
        """
        kind = Kind(instruction.opcode.removesuffix("-start"))
        base = Collective(
            kind=kind,
            operands=tuple(operands),
            results=tuple(results),
            name=instruction.name,
            source=instruction.source,
        )
        if kind in (Kind.SEND, Kind.RECV):
            return self._point_to_point(instruction, base, validation), None
        if kind is Kind.PERMUTE:
            return self._permute(instruction, base, validation), None
        if validation is not None:
            raise instruction.invalid(f"has {VALIDATION_ATTRIBUTE}, but no source-target pairs")
        groups = replica_groups(instruction, self.num_replicas, self.num_partitions)
        collective = replace(base, groups=tuple(groups))
        reducer = None
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            (computation,) = instruction.called
            reduction = native_reduction(computation)
            collective = replace(collective, reduction=reduction)
            reducer = None if reduction else computation
        check = _CHECKS.get(kind)
        return (check(instruction, collective) if check else collective), reducer

    def _permute(
        self, instruction: Instruction, base: Collective, validation: str | None
    ) -> Collective:
        if instruction.proto.dynamic_slice_sizes:
            raise instruction.unsupported(
                "the in-place form with slice sizes is not supported; cut out the slice, permute it, and "
                "write it with dynamic-update-slice"
            )
        if base.operands != base.results:
            raise instruction.invalid("operands and results differ in type")
        pairs = [(p.source, p.target) for p in instruction.proto.source_target_pairs]
        return self._with_pairs(instruction, base, pairs, validation)

    def _point_to_point(
        self, instruction: Instruction, base: Collective, validation: str | None
    ) -> Collective:
        if instruction.proto.is_host_transfer:
            raise instruction.unsupported("transfers to the host are not supported; use a callback")
        text = instruction.attributes.get(PAIRS_ATTRIBUTE)
        if text is None:
            raise instruction.unsupported(
                f"it lacks the frontend attribute {PAIRS_ATTRIBUTE}, which says who sends to whom"
            )
        pairs = parse_pairs(instruction, text)
        return replace(
            self._with_pairs(instruction, base, pairs, validation),
            channel=instruction.proto.channel_id,
        )

    def _with_pairs(
        self,
        instruction: Instruction,
        base: Collective,
        pairs: list[tuple[int, int]],
        validation: str | None,
    ) -> Collective:
        flat = source_target_pairs(instruction, pairs, self.num_replicas, self.num_partitions)
        return replace(
            base,
            pairs=tuple(flat),
            valid_iterations=self._valid_iterations(instruction, len(pairs), validation),
        )

    def _valid_iterations(
        self, instruction: Instruction, num_pairs: int, text: str | None
    ) -> tuple[tuple[int, int], ...]:
        """Bounds for each pair, repeated for each replica or partition as the pairs are."""
        if text is None:
            return ()
        copies = self.num_replicas if instruction.proto.channel_id > 0 else self.num_partitions
        if text.strip('" ') == "invalid":
            return (NEVER,) * (num_pairs * copies)
        bounds = parse_pairs(instruction, text.strip('" '))
        for low, high in bounds:
            if (low, high) != NEVER and not 0 <= low <= high:
                raise instruction.invalid(
                    f"{VALIDATION_ATTRIBUTE} has the bounds {{{low},{high}}}: expected first and last "
                    "iteration, counted from 0, or {1,0} for never"
                )
        if len(bounds) != num_pairs:
            raise instruction.invalid(
                f"{VALIDATION_ATTRIBUTE} has {len(bounds)} bounds for {num_pairs} pairs"
            )
        return tuple(bounds) * copies


def _unlisted(instruction: Instruction) -> str:
    """Advice for an error about groups of the wrong size: without a list, all devices are one group."""
    if spelled_groups(instruction):
        return ""
    return (
        "; it lists no groups, so that all replicas or partitions are one. Their numbers are "
        "replica_count= and num_partitions= in the module's first line"
    )


def _all_to_all(instruction: Instruction, collective: Collective) -> Collective:
    dimensions = instruction.proto.dimensions
    sizes = {len(g) for g in collective.groups}
    if collective.operands != collective.results:
        raise instruction.invalid("operands and results differ in type")
    if not dimensions:
        if sizes != {len(collective.operands)}:
            raise instruction.invalid(
                f"has {len(collective.operands)} operands for groups of {sorted(sizes)}"
                + _unlisted(instruction)
            )
        if len(set(collective.operands)) > 1:
            types = ", ".join(map(str, collective.operands))
            raise instruction.invalid(f"its members exchange parts that differ in type: {types}")
        return replace(collective, tuple_form=True)
    split = dimensions[0]
    if len(collective.operands) != 1:
        raise instruction.invalid(f"splits one operand, and has {len(collective.operands)}")
    shape = collective.operands[0].shape
    if not 0 <= split < len(shape) or any(shape[split] % size for size in sizes):
        raise instruction.invalid(f"cannot split dimension {split} of {collective.operands[0]}")
    return replace(collective, dimension=split)


def _resized(instruction: Instruction, collective: Collective) -> Collective:
    """all-gather and reduce-scatter: one dimension is multiplied or divided by the group size."""
    if len(instruction.proto.dimensions) != 1:
        raise instruction.invalid("needs exactly one dimension")
    dimension = instruction.proto.dimensions[0]
    sizes = {len(group) for group in collective.groups}
    if len(sizes) != 1:
        raise instruction.invalid(f"its replica groups differ in size: {sorted(sizes)}")
    (size,) = sizes
    if len(collective.operands) != len(collective.results):
        raise instruction.invalid("has operands and results that differ in number")
    for operand, result in zip(collective.operands, collective.results, strict=True):
        small, large = (
            (operand, result) if collective.kind is Kind.ALL_GATHER else (result, operand)
        )
        expected = list(small.shape)
        if not 0 <= dimension < len(expected):
            raise instruction.invalid(f"{operand} has no dimension {dimension}")
        expected[dimension] *= size
        if tuple(expected) != large.shape or operand.dtype != result.dtype:
            raise instruction.invalid(
                f"{operand} and {result} do not fit groups of {size} along dimension {dimension}"
                + _unlisted(instruction)
            )
    return replace(collective, dimension=dimension)


def _broadcast(instruction: Instruction, collective: Collective) -> Collective:
    dynamic = instruction.proto.has_dynamic_root
    count = len(collective.operands) - dynamic
    if count < 1 or collective.operands[:count] != collective.results:
        raise instruction.invalid("operands and results differ in type")
    root = collective.operands[-1]
    if dynamic and (root.size != 1 or root.dtype[0] not in "su"):
        raise instruction.invalid(f"its root is {root}, and should be one integer")
    return replace(collective, dynamic_root=dynamic)


def _ragged(instruction: Instruction, collective: Collective) -> Collective:
    if len(collective.operands) != 6 or len(collective.results) != 1:
        raise instruction.invalid("needs six operands and one result")
    given, taken, *counts = collective.operands
    if taken != collective.results[0]:
        raise instruction.invalid(f"writes into {taken}, and gives {collective.results[0]}")
    rows = given.shape[1:] == taken.shape[1:] and bool(given.shape) and bool(taken.shape)
    if given.dtype != taken.dtype or not rows:
        raise instruction.invalid(f"rows of {given} do not fit into {taken}")
    if len({t.shape for t in counts}) != 1 or any(
        len(t.shape) != 1 or t.dtype[0] not in "su" for t in counts
    ):
        raise instruction.invalid("its offsets and sizes are not four vectors of integers")
    return collective


def _all_reduce(instruction: Instruction, collective: Collective) -> Collective:
    if collective.operands != collective.results:
        raise instruction.invalid("operands and results differ in type")
    return collective


_CHECKS: dict[Kind, Callable[[Instruction, Collective], Collective]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_GATHER: _resized,
    Kind.REDUCE_SCATTER: _resized,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BROADCAST: _broadcast,
    Kind.RAGGED_ALL_TO_ALL: _ragged,
}

_NATIVE = {str(r): r for r in Reduction}


def native_reduction(computation: Computation) -> Reduction | None:
    """The reduction that a reducer with two scalar parameters is, or None.

    Recognized: one commutative op over the two parameters in either order, each perhaps converted
    to a type that holds it exactly before, and the result converted back after.
    """
    if len(computation.parameters) != 2:
        return None
    root = _through(computation.root)
    reduction = _NATIVE.get(root.opcode)
    if reduction is None:
        return None
    operands = [_through(operand) for operand in root.operands]
    if {id(o) for o in operands} != {id(p) for p in computation.parameters}:
        return None
    scalar = computation.parameters[0].shape.element_type
    if computation.root.shape.element_type != scalar:
        return None
    if root.shape.element_type != scalar and not _widens(scalar, root.shape.element_type):
        return None
    return reduction


# bf16 and f16 to f32 and f64, f32 to f64, f8 types to f16, bf16 and up: accumulating wider is exact
# for minima and maxima and more accurate than the type itself for sums. XLA's codes.
_WIDER = {16: {11, 12}, 10: {11, 12}, 11: {12}}
_F8 = {19, 20, 23, 24, 25, 28, 29, 33}


def _widens(narrow: int, wide: int) -> bool:
    return wide in _WIDER.get(narrow, ()) or (narrow in _F8 and wide in {10, 11, 12, 16})


def _through(instruction: Instruction) -> Instruction:
    while instruction.opcode in ("convert", "copy"):
        (instruction,) = instruction.operands
    return instruction
