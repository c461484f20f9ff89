"""One table of the dimensions along which ops are independent: `batches`.

An op is independent along a dimension if part p of its results along it follows from part p of some operands
and from all of the others. A `Batch` names that dimension of each operand and result. A rule gives an op's
batches; an op without a rule has none. Elementwise ops have one for each dimension (`ops.Op.elementwise`).

Custom calls that JAX lowers ``jax.numpy.linalg`` to say themselves how many of their first dimensions are
batches: the frontend attribute ``num_batch_dims``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from stretto.collectives.types import TensorType

from ...graph import Instruction
from ...ops import op_of


class Batch(NamedTuple):
    """``operands``, ``results``: the dimension of each of them, None for operands that are needed whole, and
    for results that are those of the whole (of loops; in the rules here there are none)."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]

    @property
    def along(self) -> tuple[int, ...]:
        """``results``, where all are cut."""
        return tuple([d for d in self.results if d is not None])


Types = Sequence[TensorType]
Rule = Callable[[Any, Types, Types, int], Iterator[Batch]]


def batches(
    instruction: Instruction, operands: Types, results: Types, parts: int
) -> Iterator[Batch]:
    """The batches of an instruction for cuts into this many parts. ``operands``, ``results``: its arrays."""
    opcode = instruction.opcode
    rule = _RULES.get(opcode, _elementwise if op_of(opcode).elementwise else None)
    if opcode == "bitcast":
        yield from _bitcast(instruction, operands, results, parts)
    elif rule is not None:
        yield from rule(instruction.proto, operands, results, parts)


def _elementwise(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Scalars are operands of every element."""
    rank = len(results[0].shape)
    for d in range(rank):
        yield Batch(
            tuple([d if len(o.shape) == rank else None for o in operands]), (d,) * len(results)
        )


def _leading(count: int, operands: Types, results: Types) -> Iterator[Batch]:
    for d in range(count):
        if all(len(t.shape) > d for t in (*operands, *results)):
            yield Batch((d,) * len(operands), (d,) * len(results))


def _except(gone: Sequence[int], operands: Types, results: Types) -> Iterator[Batch]:
    """Operands and results of the same rank, independent along all dimensions but some."""
    for d in range(len(results[0].shape)):
        if d not in gone:
            yield Batch((d,) * len(operands), (d,) * len(results))


# What moves elements.


def _broadcast(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    mapped = list(proto.dimensions)
    for d, size in enumerate(results[0].shape):
        if d not in mapped:
            yield Batch((None,), (d,))
        elif operands[0].shape[mapped.index(d)] == size:
            yield Batch((mapped.index(d),), (d,))


def _transpose(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    for d, source in enumerate(proto.dimensions):
        yield Batch((source,), (d,))


def same_cut(given: Sequence[int], other: Sequence[int], dimension: int, parts: int) -> int | None:
    """The dimension of ``other`` whose parts are those of ``given`` along ``dimension``, in a row-major
    reshape.

    Element i is in part ``i // inner % parts``: the same for both shapes where ``inner`` is, and so where the
    dimensions before the cut have the same product. A dimension that does not divide must be the same.
    """
    before = prod(given[:dimension])
    divides = given[dimension] % parts == 0
    for candidate, size in enumerate(other):
        if prod(other[:candidate]) != before or not size:
            continue
        if size == given[dimension] or (divides and size % parts == 0):
            return candidate
    return None


def _reshape(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    source, target = operands[0].shape, results[0].shape
    for d in range(len(source)):
        to = same_cut(source, target, d, parts)
        if to is not None:
            yield Batch((d,), (to,))


def memory_order(shape: Any, rank: int) -> list[int]:
    """The dimensions of an array in memory, from major to minor."""
    return list(shape.layout.minor_to_major)[::-1] or list(range(rank))


def _bitcast(
    instruction: Instruction, operands: Types, results: Types, parts: int
) -> Iterator[Batch]:
    (source,), (target,) = operands, results
    if source.dtype != target.dtype:
        return
    into = memory_order(instruction.operands[0].shape, len(source.shape))
    out = memory_order(instruction.shape, len(target.shape))
    given, other = [source.shape[d] for d in into], [target.shape[d] for d in out]
    for position, d in enumerate(into):
        to = same_cut(given, other, position, parts)
        if to is not None:
            yield Batch((d,), (out[to],))


def _bitcast_convert(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Another type may have one dimension more, or less, at the end."""
    yield from _leading(min(len(operands[0].shape), len(results[0].shape)), operands, results)


def _reverse(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    yield from _except(list(proto.dimensions), operands, results)


def _whole(operands: Types, results: Types) -> Iterator[int]:
    """Dimensions of the first operand that are as long in the result."""
    for d, (given, left) in enumerate(zip(operands[0].shape, results[0].shape, strict=True)):
        if given == left:
            yield d


def _slice(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    for d in _whole(operands, results):
        if proto.slice_dimensions[d].stride == 1:
            yield Batch((d,), (d,))


def _dynamic_slice(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Starts are clamped, to 0 where the slice is whole."""
    for d in _whole(operands, results):
        yield Batch((d, *(None,) * (len(operands) - 1)), (d,))


def _dynamic_update_slice(
    proto: Any, operands: Types, results: Types, parts: int
) -> Iterator[Batch]:
    for d, (given, new) in enumerate(zip(operands[0].shape, operands[1].shape, strict=True)):
        if given == new:
            yield Batch((d, d, *(None,) * (len(operands) - 2)), (d,))


def _pad(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    for d, pad in enumerate(proto.padding_config.dimensions):
        if not (pad.edge_padding_low or pad.edge_padding_high or pad.interior_padding):
            yield Batch((d, None), (d,))


def _concatenate(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    yield from _except(list(proto.dimensions), operands, results)


def _gather(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Along dimensions of which whole slices are taken (their starts are clamped to 0), along those of the
    indices, and along those that both have in common."""
    numbers = proto.gather_dimension_numbers
    (source, indices), (target,) = operands, results
    offsets = list(numbers.offset_dims)
    gone = [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims]
    taken = [d for d in range(len(source.shape)) if d not in gone]
    for d, to in zip(taken, offsets, strict=True):
        if proto.gather_slice_sizes[d] == source.shape[d]:
            yield Batch((d, None), (to,))
    of_indices = [d for d in range(len(indices.shape)) if d != numbers.index_vector_dim]
    of_result = [d for d in range(len(target.shape)) if d not in offsets]
    common = list(numbers.start_indices_batching_dims)
    for d, to in zip(of_indices, of_result, strict=True):
        if d in common:
            yield Batch((numbers.operand_batching_dims[common.index(d)], d), (to,))
        else:
            yield Batch((None, d), (to,))


def _scatter(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Along dimensions of which whole windows are written (those that begin elsewhere than at 0 are left
    out), and along those that arrays, indices and updates have in common."""
    numbers = proto.scatter_dimension_numbers
    count = len(operands) // 2
    source, indices, updates = operands[0], operands[count], operands[count + 1]
    windows = list(numbers.update_window_dims)
    common = list(numbers.input_batching_dims)
    gone = [*numbers.inserted_window_dims, *common]
    written = [d for d in range(len(source.shape)) if d not in gone]
    for d, window in zip(written, windows, strict=True):
        if updates.shape[window] == source.shape[d]:
            yield Batch((d,) * count + (None,) + (window,) * count, (d,) * count)
    of_indices = [d for d in range(len(indices.shape)) if d != numbers.index_vector_dim]
    of_updates = [d for d in range(len(updates.shape)) if d not in windows]
    beside = dict(zip(of_indices, of_updates, strict=True))
    for d, index in zip(common, numbers.scatter_indices_batching_dims, strict=True):
        yield Batch((d,) * count + (index,) + (beside[index],) * count, (d,) * count)


def windows_of(proto: Any, rank: int, updates: Sequence[int]) -> list[int]:
    """The size of a scatter's windows along each dimension of its array. ``updates``: their shape."""
    numbers = proto.scatter_dimension_numbers
    windows = iter(numbers.update_window_dims)
    gone = (*numbers.inserted_window_dims, *numbers.input_batching_dims)
    return [1 if d in gone else updates[next(windows)] for d in range(rank)]


# What sums up, or works along dimensions.


def _reduce(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    count = len(operands) // 2
    kept = [d for d in range(len(operands[0].shape)) if d not in proto.dimensions]
    for to, d in enumerate(kept):
        yield Batch((d,) * count + (None,) * count, (to,) * len(results))


def is_trivial(window: Any) -> bool:
    """Whether the windows along a dimension are its elements."""
    return (
        window.size == 1
        and window.stride in (0, 1)
        and not (window.padding_low or window.padding_high)
        and window.base_dilation in (0, 1)
    )


def _reduce_window(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    count = len(operands) // 2
    for d, window in enumerate(proto.window.dimensions):
        if is_trivial(window):
            yield Batch((d,) * count + (None,) * count, (d,) * len(results))


def _select_and_scatter(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    for d, window in enumerate(proto.window.dimensions):
        if is_trivial(window):
            yield Batch((d, d, None), (d,))


def _sort(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    yield from _except(list(proto.dimensions), operands, results)


def _fft(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    yield from _leading(len(operands[0].shape) - len(proto.fft_length), operands, results)


def _dot(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    numbers = proto.dot_dimension_numbers
    left, right = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    for to, (one, other) in enumerate(zip(left, right, strict=True)):
        yield Batch((one, other), (to,))
    to = len(left)
    for position, gone in enumerate(
        (
            [*left, *numbers.lhs_contracting_dimensions],
            [*right, *numbers.rhs_contracting_dimensions],
        )
    ):
        for d in range(len(operands[position].shape)):
            if d not in gone:
                yield Batch((d, None) if position == 0 else (None, d), (to,))
                to += 1


def _convolution(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    """Along the batch, along groups of features, and without groups along the features of the result."""
    numbers = proto.convolution_dimension_numbers
    groups, batches = proto.feature_group_count or 1, proto.batch_group_count or 1
    if batches == 1:
        yield Batch((numbers.input_batch_dimension, None), (numbers.output_batch_dimension,))
        kernel, to = numbers.kernel_output_feature_dimension, numbers.output_feature_dimension
        if groups == 1:
            yield Batch((None, kernel), (to,))
        elif groups % parts == 0:
            yield Batch((numbers.input_feature_dimension, kernel), (to,))


def _cholesky(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    yield from _leading(len(operands[0].shape) - 2, operands, results)


def _triangular_solve(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    rank = len(results[0].shape)
    yield from _leading(rank - 2, operands, results)
    free = rank - 1 if proto.triangular_solve_options.left_side else rank - 2
    yield Batch((None, free), (free,))


# The side of a triangular solve of LAPACK: an attribute in the text of its configuration.
_LEFT, _RIGHT = b"side = 76 : ui8", b"side = 82 : ui8"


def _custom_call(proto: Any, operands: Types, results: Types, parts: int) -> Iterator[Batch]:
    if proto.custom_call_has_side_effect:
        return
    if proto.custom_call_target == "TopK":
        yield from _leading(len(operands[0].shape) - 1, operands, results)
        return
    count = proto.frontend_attributes.map.get("num_batch_dims", "")
    if not count.isdecimal():
        return
    yield from _leading(int(count), operands, results)
    if proto.custom_call_target.startswith("lapack_") and "trsm" in proto.custom_call_target:
        rank = len(results[0].shape)
        config = proto.backend_config
        if _LEFT in config:
            yield Batch((None, rank - 1), (rank - 1,))
        elif _RIGHT in config:
            yield Batch((None, rank - 2), (rank - 2,))


_RULES: dict[str, Rule] = {
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "cholesky": _cholesky,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "custom-call": _custom_call,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "fft": _fft,
    "gather": _gather,
    "map": _elementwise,
    "pad": _pad,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "reshape": _reshape,
    "reverse": _reverse,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "slice": _slice,
    "sort": _sort,
    "transpose": _transpose,
    "triangular-solve": _triangular_solve,
}
