"""Collectives to test communicators with, and what they must give, written out in plain numpy.

Operands are chosen so that results are exact where order of operations could matter: sums of quarters,
products of powers of two. Narrow floats then have one right answer, the exact result rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import ELEMENT_TYPES, TensorType

Inputs = dict[int, list[np.ndarray]]

DTYPES = tuple(ELEMENT_TYPES)
BITWISE = (Reduction.AND, Reduction.OR, Reduction.XOR)


def is_float(dtype: str) -> bool:
    return dtype[0] == "f" or dtype == "bf16"


def reductions(dtype: str) -> tuple[Reduction, ...]:
    """The reductions that HLO defines on a type."""
    if dtype == "pred" or dtype[0] in "su":
        return tuple(Reduction)
    if dtype[0] == "c":
        return (Reduction.SUM, Reduction.PRODUCT)
    return tuple(r for r in Reduction if r not in BITWISE)


def random_array(
    rng: np.random.Generator, type_: TensorType, reduction: Reduction | None = None
) -> np.ndarray:
    """An operand whose reductions are exact (before the one rounding)."""
    dtype, shape = type_.dtype, type_.shape
    if dtype == "pred":
        return np.asarray(rng.integers(0, 2, shape), np.bool_)
    if dtype[0] in "su":
        signed = dtype[0] == "s"
        bits = int(dtype[1:])
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        wide = np.int64 if signed else np.uint64
        return np.asarray(rng.integers(low, high, shape, wide, endpoint=True)).astype(type_.numpy)
    if dtype == "f8e8m0fnu" or reduction is Reduction.PRODUCT:
        values = 2.0 ** rng.integers(-1, 2, shape)
        if dtype != "f8e8m0fnu":
            values = values * rng.choice([-1.0, 1.0], shape)
    else:
        values = rng.integers(-6, 7, shape) / 2.0
    if dtype[0] == "c":
        values = values + 1j * rng.integers(-2, 3, shape)
    return np.asarray(values).astype(type_.numpy)


def reduce(reduction: Reduction, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Element by element, in arithmetic that is exact, then rounded or wrapped once."""
    dtype = arrays[0].dtype
    if dtype == np.bool_:
        stacked = np.stack(arrays)
        if reduction in (Reduction.SUM, Reduction.OR, Reduction.MAX):
            return stacked.any(0)
        if reduction is Reduction.XOR:
            return stacked.sum(0) % 2 == 1
        return stacked.all(0)
    name = next(e.name for e in ELEMENT_TYPES.values() if e.numpy == dtype)
    wide: type = {"s": np.int64, "u": np.uint64, "c": np.complex128}.get(name[0], np.float64)
    stacked = np.stack([a.astype(wide) for a in arrays])
    ufunc = {
        Reduction.SUM: np.add,
        Reduction.PRODUCT: np.multiply,
        Reduction.MIN: np.minimum,
        Reduction.MAX: np.maximum,
        Reduction.AND: np.bitwise_and,
        Reduction.OR: np.bitwise_or,
        Reduction.XOR: np.bitwise_xor,
    }[reduction]
    with np.errstate(all="ignore"):
        result = ufunc.reduce(stacked, 0)
        if reduction in (Reduction.MIN, Reduction.MAX) and is_float(name):
            result = np.where(np.isnan(stacked).any(0), np.nan, result)
        return np.asarray(result).astype(dtype)


def zeros(types: Sequence[TensorType]) -> list[np.ndarray]:
    return [
        np.frombuffer(bytes(t.size * t.numpy.itemsize), t.numpy).reshape(t.shape) for t in types
    ]


def expected(collective: Collective, inputs: Inputs, skip: frozenset[int] = frozenset()) -> Inputs:
    """What each device must get. Devices in no group, and targets of no pair, get zeros."""
    results = {i: zeros(collective.results) for i in inputs}
    if collective.kind is Kind.PERMUTE:
        for k, (source, target) in enumerate(collective.pairs):
            if k not in skip:
                results[target] = list(inputs[source])
        return results
    for group in collective.groups:
        outputs = _GROUP[collective.kind](collective, [inputs[i] for i in group])
        results.update(zip(group, outputs, strict=True))
    return results


def _all_reduce(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    assert c.reduction is not None
    return [[reduce(c.reduction, column) for column in zip(*rows, strict=True)]] * len(rows)


def _all_gather(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    columns = zip(*rows, strict=True)
    return [[np.concatenate(column, c.dimension) for column in columns]] * len(rows)


def _reduce_scatter(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    (totals, *_) = _all_reduce(c, rows)
    parts = [np.split(total, len(rows), c.dimension) for total in totals]
    return [list(row) for row in zip(*parts, strict=True)]


def _all_to_all(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    if c.tuple_form:
        return [list(column) for column in zip(*rows, strict=True)]
    size = len(rows)
    return [
        [
            np.concatenate([np.split(a, size, c.dimension)[me] for a in column], c.dimension)
            for column in zip(*rows, strict=True)
        ]
        for me in range(size)
    ]


def _broadcast(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    root = int(rows[0][-1][0]) if c.dynamic_root else 0
    return [rows[root][: len(c.results)]] * len(rows)


def _ragged(c: Collective, rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    size = len(rows)
    outs = [row[1].copy() for row in rows]
    for source in rows:
        data, _, starts, counts, places, _ = source
        updates = len(starts) // size
        for n in range(len(starts)):
            receiver = outs[n // updates]
            for row in range(int(counts[n])):
                receiver[int(places[n]) + row] = data[int(starts[n]) + row]
    return [[out] for out in outs]


_GROUP: dict[Kind, Callable[[Collective, list[list[np.ndarray]]], list[list[np.ndarray]]]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BROADCAST: _broadcast,
    Kind.RAGGED_ALL_TO_ALL: _ragged,
}


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal in shape, type and every value; NaN equals NaN, and zeros of either sign each other."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if got.tobytes() == want.tobytes():
        return True
    if got.dtype.kind in "biu":
        return False
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    return bool(np.array_equal(got.astype(wide), want.astype(wide), equal_nan=True))


def as_results(collective: Collective, memory: Inputs) -> Inputs:
    """Bytes of devices as the arrays that a collective gives."""
    return {
        i: [a.view(t.numpy).reshape(t.shape) for a, t in zip(row, collective.results, strict=True)]
        for i, row in memory.items()
    }


def difference(collective: Collective, got: Inputs, want: Inputs) -> str:
    """Empty, or what is wrong with the results of the local devices."""
    for i in got:
        if len(got[i]) != len(want[i]):
            return f"device {i} of {collective}: {len(got[i])} results, not {len(want[i])}"
        for k, (a, b) in enumerate(zip(got[i], want[i], strict=True)):
            if not same(a, b):
                return f"device {i}, result {k} of {collective}:\ngot {a}\nnot {b}"
    return ""


@dataclass(frozen=True)
class Case:
    """A collective with operands for all devices."""

    collective: Collective
    inputs: Inputs
    skip: frozenset[int] = frozenset()

    def expected(self) -> Inputs:
        return expected(self.collective, self.inputs, self.skip)


def group_forms(devices: int) -> list[tuple[tuple[int, ...], ...]]:
    """Everyone; halves; strided; in another order; single devices; a part of the devices."""
    ids = tuple(range(devices))
    forms = [(ids,), tuple((i,) for i in ids), (ids[::-1],)]
    if devices % 2 == 0 and devices > 2:
        half = devices // 2
        forms += [
            (ids[:half], ids[half:]),
            tuple((i, i + half) for i in range(half)),
            (tuple(ids[::2]), tuple(ids[1::2])),
        ]
    if devices > 2:
        forms.append((ids[1:],))
        order = np.random.default_rng(devices).permutation(devices)
        forms.append((tuple(int(i) for i in order),))
    return forms


def uneven_forms(devices: int) -> list[tuple[tuple[int, ...], ...]]:
    """For the kinds whose groups may differ in size."""
    ids = tuple(range(devices))
    return [*group_forms(devices), *([(ids[: devices - 1], ids[-1:])] if devices > 1 else [])]


def make(
    kind: Kind,
    groups: tuple[tuple[int, ...], ...],
    dtype: str,
    shard: tuple[int, ...],
    *,
    dimension: int = 0,
    reduction: Reduction | None = None,
    variadic: int = 1,
    tuple_form: bool = False,
    dynamic_root: bool = False,
) -> Collective:
    """A collective on ``variadic`` arrays; ``shard`` is the smallest shape that it sees."""
    size = len(groups[0])
    small = [TensorType(dtype, (*shard, *range(2, 2 + k))) for k in range(variadic)]

    def grown(t: TensorType) -> TensorType:
        dims = list(t.shape)
        dims[dimension] *= size
        return TensorType(t.dtype, tuple(dims))

    operands, results = list(small), list(small)
    if kind is Kind.ALL_GATHER:
        results = [grown(t) for t in small]
    elif kind is Kind.REDUCE_SCATTER:
        operands = [grown(t) for t in small]
    elif kind is Kind.ALL_TO_ALL and tuple_form:
        operands = results = [small[0]] * size
    elif kind is Kind.ALL_TO_ALL:
        operands = results = [grown(t) for t in small]
    if dynamic_root:
        operands = [*operands, TensorType("s32", (1,))]
    has_dimension = kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) or (
        kind is Kind.ALL_TO_ALL and not tuple_form
    )
    return Collective(
        kind,
        tuple(operands),
        tuple(results),
        groups,
        reduction=reduction,
        dimension=dimension if has_dimension else -1,
        tuple_form=tuple_form,
        dynamic_root=dynamic_root,
    )


def operands_of(rng: np.random.Generator, collective: Collective, devices: int) -> Inputs:
    """Operands for all devices."""
    inputs = {
        i: [random_array(rng, t, collective.reduction) for t in collective.operands]
        for i in range(devices)
    }
    if collective.dynamic_root:
        for group in collective.groups:
            root = np.array([int(rng.integers(len(group)))], np.int32)
            for i in group:
                inputs[i][-1] = root
    return inputs


def ragged_case(
    rng: np.random.Generator,
    devices: int,
    groups: tuple[tuple[int, ...], ...],
    dtype: str,
    *,
    tail: tuple[int, ...] = (3,),
    updates: int = 1,
    offsets: str = "s32",
) -> Case:
    """A ragged all-to-all in which everyone sends up to three rows of each update to everyone."""
    size = len(groups[0])
    rows = 4 * size * updates
    data, where = TensorType(dtype, (rows, *tail)), TensorType(offsets, (size * updates,))
    collective = Collective(
        Kind.RAGGED_ALL_TO_ALL, (data, data, where, where, where, where), (data,), groups
    )
    inputs: Inputs = {}
    integer = where.numpy
    for i in range(devices):
        inputs[i] = [random_array(rng, data), random_array(rng, data)]
        inputs[i] += [np.zeros(size * updates, integer) for _ in range(4)]
    for group in groups:
        counts = rng.integers(0, 4, (size, size, updates))
        for a, source in enumerate(group):
            starts = np.arange(size * updates) * 4
            inputs[source][2] = starts.astype(integer)
            inputs[source][3] = counts[a].reshape(-1).astype(integer)
            places = np.array([[(a * updates + u) * 4 for u in range(updates)]] * size)
            inputs[source][4] = places.reshape(-1).astype(integer)
            inputs[source][5] = counts[:, a].reshape(-1).astype(integer)
    return Case(collective, inputs)


def permute_case(
    rng: np.random.Generator,
    pairs: tuple[tuple[int, int], ...],
    devices: int,
    types: tuple[TensorType, ...],
    skip: frozenset[int] = frozenset(),
) -> Case:
    collective = Collective(Kind.PERMUTE, types, types, pairs=pairs)
    return Case(collective, operands_of(rng, collective, devices), skip)


def pair_forms(devices: int) -> list[tuple[tuple[int, int], ...]]:
    """A ring, a chain, an exchange, a pair of one device, none, and a cycle through some."""
    n = devices
    return [
        tuple((i, (i + 1) % n) for i in range(n)),
        tuple((i, i + 1) for i in range(n - 1)),
        tuple((i, n - 1 - i) for i in range(n)),
        ((0, 0),),
        (),
        ((n - 1, 0), (0, n - 1)) if n > 1 else ((0, 0),),
    ]


def every_case(devices: int, seed: int = 0) -> Iterator[Case]:
    """Kind x dtype x group form, and the special shapes and sizes of each kind."""
    rng = np.random.default_rng(seed)
    forms = group_forms(devices)

    def case(*arguments: object, **options: object) -> Case:
        collective = make(*arguments, **options)  # type: ignore[arg-type]
        return Case(collective, operands_of(rng, collective, devices))

    for number, dtype in enumerate(DTYPES):
        form = forms[number % len(forms)]
        for reduction in reductions(dtype):
            yield case(Kind.ALL_REDUCE, forms[0], dtype, (3, 5), reduction=reduction)
            yield case(Kind.REDUCE_SCATTER, forms[0], dtype, (2, 3), reduction=reduction)
        yield case(
            Kind.ALL_REDUCE,
            form,
            dtype,
            (7,),
            reduction=Reduction.MAX if dtype[0] != "c" else Reduction.SUM,
            variadic=3,
        )
        yield case(Kind.ALL_GATHER, form, dtype, (2, 3), dimension=number % 2)
        yield case(Kind.ALL_TO_ALL, form, dtype, (2, 3), dimension=number % 2)
        yield case(Kind.BROADCAST, form, dtype, (4,))
        yield ragged_case(rng, devices, form, dtype)
        pairs = pair_forms(devices)[number % len(pair_forms(devices))]
        yield permute_case(rng, pairs, devices, (TensorType(dtype, (2, 3)),))

    for form, dtype in product(forms, ("f32", "bf16")):
        for dimension in (0, 1):
            options = {"dimension": dimension}
            yield case(Kind.ALL_GATHER, form, dtype, (2, 3), **options)
            yield case(Kind.ALL_GATHER, form, dtype, (1, 4), variadic=2, **options)
            yield case(Kind.ALL_TO_ALL, form, dtype, (2, 3), **options)
            yield case(Kind.ALL_TO_ALL, form, dtype, (3, 1), variadic=2, **options)
            scatter = {"reduction": Reduction.SUM, **options}
            yield case(Kind.REDUCE_SCATTER, form, dtype, (2, 3), **scatter)
            yield case(Kind.REDUCE_SCATTER, form, dtype, (1, 5), variadic=2, **scatter)
        yield case(Kind.ALL_TO_ALL, form, dtype, (5,), tuple_form=True)
        yield case(Kind.BROADCAST, form, dtype, (6,), variadic=2)
        yield case(Kind.BROADCAST, form, dtype, (), dynamic_root=True)
        yield ragged_case(rng, devices, form, dtype, updates=2, offsets="s64", tail=())
        # Empty arrays and scalars.
        for shape in ((), (0,), (3, 0)):
            yield case(Kind.ALL_REDUCE, form, dtype, shape, reduction=Reduction.SUM)
            yield case(Kind.BROADCAST, form, dtype, shape)
            if shape:
                yield case(Kind.ALL_GATHER, form, dtype, shape)
                yield case(Kind.ALL_TO_ALL, form, dtype, shape)
                yield case(Kind.REDUCE_SCATTER, form, dtype, shape, reduction=Reduction.SUM)
    for form in uneven_forms(devices):
        yield case(Kind.ALL_REDUCE, form, "f32", (9,), reduction=Reduction.SUM)
        yield case(Kind.BROADCAST, form, "s8", (9,))
    for form in (forms[0], forms[-1]):  # large enough for a message of their own
        for dtype in ("f32", "bf16", "s32", "f8e4m3fn", "pred"):
            for reduction in (Reduction.SUM, Reduction.MAX):
                big = (300001,)
                yield case(Kind.ALL_REDUCE, form, dtype, big, reduction=reduction)
                yield case(Kind.REDUCE_SCATTER, form, dtype, (30011,), reduction=reduction)
            yield case(Kind.ALL_GATHER, form, dtype, (30011,))
            yield case(Kind.ALL_TO_ALL, form, dtype, (20011,))
    for pairs in pair_forms(devices):
        types = (TensorType("f32", (4,)), TensorType("bf16", ()), TensorType("s8", (0, 2)))
        yield permute_case(rng, pairs, devices, types)
        yield permute_case(rng, pairs, devices, types, frozenset(range(0, len(pairs), 2)))
        yield permute_case(rng, pairs, devices, (TensorType("f32", (50000,)),))
