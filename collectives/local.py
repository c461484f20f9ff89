"""Collectives of devices whose memory this process can read: plain copies and reductions.

`local_collective` gives the function for one group of one collective. It takes the operands of the group's
members in group order and gives their results in the same order. Where HLO gives all members the same
result, they share one array. Operands are only read, and results are memory of the pool, never operands.

This is also what the collectives mean: other communicators are tested against it, it against definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from .communicator import Reducer
from .memory import pool
from .ops import Collective, Kind
from .ragged import check_ragged_targets, ragged_rows
from .reduce import Combine, combiner
from .types import TensorType

Array = np.ndarray
Inputs = Sequence[Sequence[Array]]  # by member, then by operand
Outputs = list[list[Array]]  # by member, then by result
Run = Callable[[Inputs], Outputs]


def local_collective(
    collective: Collective, group: Sequence[int], reducer: Reducer | None = None
) -> Run:
    """The collective for a group of devices in one process, whose ids these are.

    Raises ``NotImplementedError`` for a reduction that its types do not have, ``ValueError`` where types
    and group do not fit.
    """
    if collective.kind is Kind.RAGGED_ALL_TO_ALL:
        return _ragged_all_to_all(group)
    return _BUILDERS[collective.kind](collective, len(group), reducer)


def part(array: Array, dimension: int, index: int, count: int) -> Array:
    """Part ``index`` of ``count`` equal parts along a dimension; a view."""
    size = array.shape[dimension] // count
    return array[(slice(None),) * dimension + (slice(index * size, (index + 1) * size),)]


def is_leading(type_: TensorType, dimension: int) -> bool:
    """Whether parts along the dimension are contiguous and follow each other in memory."""
    return prod(type_.shape[:dimension]) == 1


def combiners(collective: Collective) -> list[Combine]:
    """The native reduction for each operand."""
    assert collective.reduction is not None
    return [combiner(type_.dtype, collective.reduction) for type_ in collective.operands]


def fold(reducer: Reducer, inputs: Inputs) -> list[Array]:
    """Reduce with a program's reducer, in group order, into memory of the pool."""
    total = list(inputs[0])
    for operands in inputs[1:]:
        total = list(reducer(total, list(operands)))
    return [pool.copy(array) for array in total]


def root_of(roots: Sequence[Array], size: int) -> int:
    """The root that a broadcast's last operands name. Raises ``RuntimeError`` unless they agree on one."""
    values = {int(root.reshape(-1)[0]) for root in roots}
    if len(values) != 1:
        raise RuntimeError(f"members name different roots: {sorted(values)}")
    (root,) = values
    if not 0 <= root < size:
        raise RuntimeError(f"root {root} is not in a group of {size}")
    return root


def check_parts(type_: TensorType, dimension: int, size: int) -> None:
    """Raise ``ValueError`` unless the dimension divides into ``size`` parts."""
    if not 0 <= dimension < len(type_.shape) or type_.shape[dimension] % size:
        raise ValueError(f"dimension {dimension} of {type_} does not divide into {size} parts")


def _all_reduce(collective: Collective, size: int, reducer: Reducer | None) -> Run:
    if reducer is not None:
        return lambda inputs: [fold(reducer, inputs)] * size
    combines, types = combiners(collective), collective.operands

    def run(inputs: Inputs) -> Outputs:
        results = []
        for index, (combine, type_) in enumerate(zip(combines, types, strict=True)):
            out = pool.empty(type_.shape, type_.numpy)
            combine([operands[index] for operands in inputs], out)
            results.append(out)
        return [results] * size

    return run


def _all_gather(collective: Collective, size: int, reducer: Reducer | None) -> Run:
    results, dimension = collective.results, collective.dimension
    for type_ in results:
        check_parts(type_, dimension, size)

    def run(inputs: Inputs) -> Outputs:
        gathered = []
        for index, type_ in enumerate(results):
            out = pool.empty(type_.shape, type_.numpy)
            for member, operands in enumerate(inputs):
                np.copyto(part(out, dimension, member, size), operands[index])
            gathered.append(out)
        return [gathered] * size

    return run


def _reduce_scatter(collective: Collective, size: int, reducer: Reducer | None) -> Run:
    dimension, results = collective.dimension, collective.results
    for type_ in collective.operands:
        check_parts(type_, dimension, size)
    if reducer is not None:

        def fold_parts(inputs: Inputs) -> Outputs:
            totals = fold(reducer, inputs)
            return [
                [pool.copy(part(total, dimension, member, size)) for total in totals]
                for member in range(size)
            ]

        return fold_parts
    combines = combiners(collective)

    def run(inputs: Inputs) -> Outputs:
        outputs: Outputs = []
        for member in range(size):
            row = []
            for index, (combine, type_) in enumerate(zip(combines, results, strict=True)):
                out = pool.empty(type_.shape, type_.numpy)
                combine(
                    [part(operands[index], dimension, member, size) for operands in inputs], out
                )
                row.append(out)
            outputs.append(row)
        return outputs

    return run


def _all_to_all(collective: Collective, size: int, reducer: Reducer | None) -> Run:
    if collective.tuple_form:
        if len(collective.operands) != size:
            raise ValueError(f"{len(collective.operands)} operands for a group of {size}")
        return lambda inputs: [
            [pool.copy(operands[member]) for operands in inputs] for member in range(size)
        ]
    dimension, results = collective.dimension, collective.results
    for type_ in results:
        check_parts(type_, dimension, size)

    def run(inputs: Inputs) -> Outputs:
        outputs: Outputs = []
        for member in range(size):
            row = []
            for index, type_ in enumerate(results):
                out = pool.empty(type_.shape, type_.numpy)
                for source, operands in enumerate(inputs):
                    np.copyto(
                        part(out, dimension, source, size),
                        part(operands[index], dimension, member, size),
                    )
                row.append(out)
            outputs.append(row)
        return outputs

    return run


def _broadcast(collective: Collective, size: int, reducer: Reducer | None) -> Run:
    count, dynamic = len(collective.results), collective.dynamic_root

    def run(inputs: Inputs) -> Outputs:
        root = root_of([operands[-1] for operands in inputs], size) if dynamic else 0
        return [[pool.copy(array) for array in inputs[root][:count]]] * size

    return run


def _ragged_all_to_all(group: Sequence[int]) -> Run:
    def run(inputs: Inputs) -> Outputs:
        rows = [ragged_rows(o, group, own) for o, own in zip(inputs, group, strict=True)]
        outputs: Outputs = []
        for member, own in enumerate(group):
            out = pool.copy(inputs[member][1])
            for source, (starts, sends, targets, _) in enumerate(rows):
                expected = rows[member][3][source]
                check_ragged_targets(
                    targets[member], sends[member], expected, len(out), group[source], own
                )
                for start, count, target in zip(
                    starts[member], sends[member], targets[member], strict=True
                ):
                    out[target : target + count] = inputs[source][0][start : start + count]
            outputs.append([out])
        return outputs

    return run


_BUILDERS: dict[Kind, Callable[[Collective, int, Reducer | None], Run]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BROADCAST: _broadcast,
}
