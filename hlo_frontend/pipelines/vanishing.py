"""Which elements of a program are zeros where a product with zeros is zero.

`Forward` knows zeros that are there whatever else is computed: 0 * x is none of them, since it is NaN where x
is NaN or infinite. `Vanishing` takes products with zeros, and zeros that are divided, to be zeros. What it
finds holds if no NaN and no infinity meets zeros there. And such zeros may be negative: what is replaced by
positive ones may change the sign of zeros, and nothing else.

It goes through a program that `Forward` has followed, element by element in reduced form (see
`passes.valid.tensors`), iteration by iteration where loops were followed. Of another loop it finds what is
zero in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stretto.collectives.ops import Kind, Reduction
from stretto.runtime.errors import UnsupportedError

from ..collectives import CollectiveReader, native_reduction
from ..flatten import flatten
from ..graph import Computation, leaf_count
from ..passes.valid import tensors
from ..passes.valid.known import Known, is_reshape, padded, spread, starts_of, strides
from ..passes.valid.needs import selected
from ..passes.valid.trace import BranchTrace, Forward, LoopTrace, Trace
from ..values import BlockGraph, Node, NodeKind, Value, operand_shape, result_shape

Mask = np.ndarray | None  # elements that are zeros; None: of none it is known
Env = dict[Value, np.ndarray]
Rule = Callable[[Node, Sequence[Mask], Sequence[Known]], Mask]

# A mask that shrinks by one slice in each round would take as many rounds as there are slices.
_ROUNDS = 6


class Vanishing:
    """The zeros of a program. ``seen``: by loop that was followed, by iteration, those of its body.
    ``exact``: only positive zeros, which hold whatever meets them."""

    def __init__(self, forward: Forward, *, exact: bool) -> None:
        self.forward = forward
        self.exact = exact
        self.reader = CollectiveReader(*forward.shape)
        self.seen: dict[Node, list[tuple[Trace, Env]]] = {}
        self._flat: dict[Computation, BlockGraph | None] = {}

    def program(self, trace: Trace) -> None:
        """Go through a program. ``trace``: of its entry computation."""
        self._block(trace, [None] * len(trace.block.parameters))

    def rows(self, trace: Trace, env: Env, value: Value) -> np.ndarray:
        """For each device, whether all elements of a value are zeros."""
        mask = self._zero(trace, env, value)
        count = self.forward.num_devices
        if mask is None:
            return np.zeros(count, bool)
        return np.broadcast_to(mask.all(tuple(range(1, mask.ndim))), (count,))

    def _zero(self, trace: Trace, env: Env, value: Value) -> Mask:
        root = value.root
        if root.type is None:
            return None
        found = env.get(root)
        exact = self.forward.zero(trace, value)
        if exact is not None:
            rows = exact.reshape((-1,) + (1,) * len(root.type.shape))
            found = rows if found is None else found | rows
        return found

    def _block(self, trace: Trace, given: Sequence[Mask]) -> Env:
        env: Env = {}
        for parameter, mask in zip(trace.block.parameters, given, strict=True):
            _note(env, parameter, mask)
        self.forward.visit(len(trace.block.nodes))
        for node in trace.block.nodes:
            if node.kind in (NodeKind.CHEAP, NodeKind.LOGICAL_ID):
                continue
            zeros = [self._zero(trace, env, o) for o in node.operands]
            if node.kind is NodeKind.COLLECTIVE:
                found = self._collective(node, zeros)
            elif node.kind is NodeKind.LOOP:
                found = self._loop(trace, node, zeros)
            elif node.kind is NodeKind.BRANCH or node.instruction.opcode == "conditional":
                found = self._branch(trace, node, zeros)
            elif node.instruction.opcode == "while":
                found = self._repeated(self._inside(node.instruction.called[0]), zeros)
            elif node.instruction.opcode == "call":
                found = self._results(self._inside(node.instruction.called[0]), zeros)
            else:
                found = [self._computed(trace, node, zeros)]
            if len(found) == len(node.results):  # otherwise nothing is known of them
                for result, mask in zip(node.results, found, strict=True):
                    _note(env, result, mask)
        return env

    def _inside(self, computation: Computation) -> Trace | None:
        """The trace of a computation of which nothing is known."""
        if computation not in self._flat:
            try:
                self._flat[computation] = flatten(computation, self.reader)
            except UnsupportedError:
                self._flat[computation] = None
        block = self._flat[computation]
        return None if block is None else Trace(block, None)

    def _results(self, trace: Trace | None, given: Sequence[Mask]) -> list[Mask]:
        if trace is None or len(given) != len(trace.block.parameters):  # as where there are tokens
            return []
        env = self._block(trace, given)
        return [self._zero(trace, env, r) for r in trace.block.results]

    def _computed(self, trace: Trace, node: Node, zeros: Sequence[Mask]) -> Mask:
        if len(node.results) != 1 or not _is_float(node.results[0]):
            return None
        opcode = node.instruction.opcode
        rule = _RULES.get(opcode)
        if rule is None or (self.exact and opcode not in _EXACT):
            return None
        if rule in _PRODUCTS:
            zeros = [
                None if _is_written(o) else z for o, z in zip(node.operands, zeros, strict=True)
            ]
        known = [None if o.type is None else self.forward.known(trace, o) for o in node.operands]
        return rule(node, zeros, known)

    # Loops and branches.

    def _loop(self, trace: Trace, node: Node, zeros: Sequence[Mask]) -> list[Mask]:
        inner = trace.inner.get(node)
        assert isinstance(inner, LoopTrace)
        if inner.summary is not None:
            return self._repeated(inner.summary, zeros)
        seen = self.seen[node] = []
        masks = list(zeros)
        for iteration in inner.iterations:
            env = self._block(iteration, masks)
            seen.append((iteration, env))
            masks = [self._zero(iteration, env, r) for r in iteration.block.results]
        return masks

    def _repeated(self, trace: Trace | None, zeros: Sequence[Mask]) -> list[Mask]:
        """What is zero before each iteration of a loop, and behind it."""
        masks = list(zeros)
        if trace is None or len(trace.block.results) != len(masks):
            return []
        for count in range(2 * _ROUNDS + len(masks)):
            found = self._results(trace, masks)
            if not found:
                return []
            left = [
                None if before is None else _every([before, after])
                for before, after in zip(masks, found, strict=True)
            ]
            if all(_same(a, b) for a, b in zip(left, masks, strict=True)):
                return masks
            if count >= _ROUNDS:
                left = [b if _same(a, b) else None for a, b in zip(left, masks, strict=True)]
            masks = left
        return []

    def _branch(self, trace: Trace, node: Node, zeros: Sequence[Mask]) -> list[Mask]:
        called = node.instruction.called
        selector = self.forward.known(trace, node.operands[0])
        chosen = None if selector is None else selected(selector, len(called))
        inner = trace.inner.get(node)
        found: list[Mask] | None = None
        position = 1
        for index, argument in enumerate(node.instruction.operands[1:]):
            if isinstance(inner, BranchTrace):
                block = inner.blocks[index]
                count = len(node.blocks[index].parameters)
            else:
                block = self._inside(called[index])
                count = leaf_count(argument.shape)
                if block is None or count != len(block.block.parameters):
                    return []
            given = zeros[position : position + count]
            position += count
            takes = None if chosen is None else chosen == index
            if block is None or (takes is not None and not takes.any()):
                continue
            results = self._results(block, given)
            if len(results) != len(node.results):
                return []
            if takes is not None:
                results = [
                    _or_not(mask, takes, r) for mask, r in zip(results, node.results, strict=True)
                ]
            found = (
                results if found is None
                else [_every(pair) for pair in zip(found, results, strict=True)]
            )  # fmt: skip
        return found or []

    def _collective(self, node: Node, zeros: Sequence[Mask]) -> list[Mask]:
        collective = node.collective
        assert collective is not None
        count = self.forward.num_devices
        if len(zeros) != len(node.results):
            return []
        if collective.kind is Kind.PERMUTE:
            return [
                self._moved(mask, collective.pairs, r)
                for mask, r in zip(zeros, node.results, strict=True)
            ]
        sums = collective.reduction is Reduction.SUM and node.reducer is None
        if collective.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) and not sums:
            return []
        if collective.kind not in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
            return []
        found: list[Mask] = []
        for mask, result in zip(zeros, node.results, strict=True):
            rows = np.zeros(count, bool)
            if mask is not None and result.type is not None:
                own = np.broadcast_to(mask.all(tuple(range(1, mask.ndim))), (count,))
                for group in collective.groups:
                    rows[list(group)] = own[list(group)].all()
                found.append(rows.reshape((-1,) + (1,) * len(result.type.shape)))
            else:
                found.append(None)
        return found

    def _moved(self, mask: Mask, pairs: Sequence[tuple[int, int]], result: Value) -> Mask:
        """What devices receive; who receives nothing has zeros."""
        assert result.type is not None
        count = self.forward.num_devices
        if mask is None:
            mask = tensors.full(len(result.type.shape), False)
        wide = np.broadcast_to(mask, (count, *mask.shape[1:]))
        found = np.ones(wide.shape, bool)
        for source, target in pairs:
            found[target] = wide[source]
        return found


def _is_float(value: Value) -> bool:
    return value.type is not None and value.type.dtype[0] in "fb"


def _is_same_type(one: Value, other: Value) -> bool:
    types = [v.type for v in (one, other)]
    return len({t.dtype for t in types if t is not None}) == 1 and None not in types


def _is_written(value: Value) -> bool:
    """Whether a value is a constant. Who multiplies by a zero of their own does so for microbatches too."""
    while value.node is not None and value.node.instruction.opcode in (
        "broadcast",
        "reshape",
        "bitcast",
    ):
        value = value.node.operands[0]
    return value.node is not None and value.node.kind is NodeKind.CHEAP


def _note(env: Env, value: Value, mask: Mask) -> None:
    if mask is not None and mask.any() and _is_float(value):
        env[value.root] = ~tensors.fit(~mask)


def _same(left: Mask, right: Mask) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and bool((left == right).all())


def _every(masks: Sequence[Mask]) -> Mask:
    found: Mask = None
    for mask in masks:
        if mask is None:
            return None
        found = mask if found is None else found & mask
    return found


def _any(masks: Sequence[Mask]) -> Mask:
    found: Mask = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found | mask
    return found


def _or_not(mask: Mask, takes: np.ndarray, result: Value) -> Mask:
    """What a branch gives, and all on devices that do not take it."""
    assert result.type is not None
    rank = len(result.type.shape)
    others = (~takes).reshape((-1,) + (1,) * rank)
    return others if mask is None else mask | others


def _wide(mask: Mask, rank: int) -> np.ndarray:
    """The mask; of a scalar, for each element of an array of this rank."""
    return tensors.full(rank, False) if mask is None else spread(mask, rank)


def _whole(mask: np.ndarray, rank: int) -> np.ndarray:
    """Whether all elements are zeros, for all elements of an array of this rank."""
    return mask.all(tuple(range(1, mask.ndim))).reshape((-1,) + (1,) * rank)


# Rules.


def _ranked(rule: Callable[[Sequence[Mask]], Mask]) -> Rule:
    def elementwise(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
        rank = len(result_shape(node))
        return rule([None if z is None else spread(z, rank) for z in zeros])

    return elementwise


def _converted(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    return zeros[0] if known[0] is None else known[0] == 0


def _select(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    rank = len(result_shape(node))
    on_true, on_false = (_wide(z, rank) for z in zeros[1:])
    if known[0] is None:
        return on_true & on_false
    predicate = spread(known[0], rank)
    return (predicate & on_true) | (~predicate & on_false)


def _broadcast(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if zeros[0] is None:
        return None
    rank = len(result_shape(node))
    return tensors.broadcast(zeros[0], rank, list(node.instruction.proto.dimensions))


def _reshape(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if zeros[0] is None:
        return None
    moved = None
    if node.instruction.opcode != "bitcast" or is_reshape(node):
        moved = tensors.reshaped(zeros[0], operand_shape(node), result_shape(node))
    elif not _is_same_type(node.operands[0], node.results[0]):
        return None
    return _whole(zeros[0], len(result_shape(node))) if moved is None else moved


def _transpose(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if zeros[0] is None:
        return None
    return zeros[0].transpose([0, *(d + 1 for d in node.instruction.proto.dimensions)])


def _reverse(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if zeros[0] is None:
        return None
    return np.flip(zeros[0], tuple(d + 1 for d in node.instruction.proto.dimensions))


def _slice(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if zeros[0] is None:
        return None
    at = [
        slice(None) if m == 1 else s for m, s in zip(zeros[0].shape[1:], strides(node), strict=True)
    ]
    return zeros[0][(slice(None), *at)]


def _concatenate(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    (axis,) = node.instruction.proto.dimensions
    rank, shape = len(result_shape(node)), result_shape(node)
    parts = [_wide(z, rank) for z in zeros]
    sizes = [max(p.shape[i] for p in parts) for i in range(rank + 1)]
    sizes[axis + 1] = shape[axis]
    if np.prod(sizes[1:]) > tensors.MOST_ELEMENTS:
        return _every([_whole(p, rank) for p in parts])
    wide = []
    for n, part in enumerate(parts):
        sizes[axis + 1] = operand_shape(node, n)[axis]
        wide.append(np.broadcast_to(part, sizes))
    return np.concatenate(wide, axis + 1)


def _pad(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    rank, shape, where = len(result_shape(node)), result_shape(node), padded(node)
    inner, filled = _wide(zeros[0], rank), _wide(zeros[1], rank)
    grown = [i for i, (n, m) in enumerate(zip(operand_shape(node), shape, strict=True)) if n != m]
    sizes = [shape[i] if i in grown else inner.shape[i + 1] for i in range(rank)]
    if where is None or np.prod(sizes) > tensors.MOST_ELEMENTS:
        return _whole(inner, rank) & filled
    found = np.broadcast_to(filled, (max(len(inner), len(filled)), *sizes)).copy()
    at = [where[i] if i in grown else slice(None) for i in range(rank)]
    found[(slice(None), *at)] = inner
    return found


def _dynamic_slice(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    mask = zeros[0]
    if mask is None:
        return None
    shape, sizes = operand_shape(node), result_shape(node)
    starts = starts_of(node, known, 1)
    if starts is not None:
        return tensors.window(mask, shape, starts, sizes)
    cut = tuple(i + 1 for i, n in enumerate(shape) if sizes[i] != n)
    return np.asarray(mask.all(cut, keepdims=True))


def _dynamic_update_slice(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    shape, sizes = operand_shape(node), operand_shape(node, 1)
    mask, update = (_wide(z, len(shape)) for z in zeros[:2])
    starts = starts_of(node, known, 2)
    cut = [i for i, n in enumerate(shape) if sizes[i] != n]
    most = np.prod([shape[i] if i in cut else update.shape[i + 1] for i in range(len(shape))])
    if starts is None or most > tensors.MOST_ELEMENTS:
        return mask & update.all(tuple(i + 1 for i in cut), keepdims=True)
    inside = tensors.placed(tensors.full(len(shape)), shape, starts, sizes)
    return (mask & ~inside) | tensors.placed(update, shape, starts, sizes)


def _reduce(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if len(zeros) != 2 or native_reduction(node.instruction.called[0]) is not Reduction.SUM:
        return None
    rank = len(result_shape(node))
    if zeros[0] is None or zeros[1] is None:
        return None
    axes = tuple(d + 1 for d in node.instruction.proto.dimensions)
    return np.logical_and(zeros[0].all(axes), spread(zeros[1], rank))


def _product(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    """A product of which each element may have any of its operands' as factors."""
    rank = len(result_shape(node))
    return _any([None if z is None else _whole(z, rank) for z in zeros[:2]])


def _gather(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    return None if zeros[0] is None else _whole(zeros[0], len(result_shape(node)))


def _scatter(node: Node, zeros: Sequence[Mask], known: Sequence[Known]) -> Mask:
    if len(zeros) != 3 or native_reduction(node.instruction.called[0]) is not Reduction.SUM:
        return None
    if zeros[2] is None:
        return None
    return _any(
        [None if zeros[0] is None else zeros[0] & _whole(zeros[2], len(result_shape(node)))]
    )


# Those that give positive zeros of positive zeros, whatever else there is.
_EXACT = (
    "add", "bitcast", "broadcast", "concatenate", "convert", "copy", "dynamic-slice",
    "dynamic-update-slice", "gather", "pad", "reduce", "reduce-precision", "reshape", "reverse", "select",
    "slice", "transpose",
)  # fmt: skip

_multiply = _ranked(_any)
_PRODUCTS = (_multiply, _product)

_RULES: dict[str, Rule] = {
    # Zeros where any factor is, or all terms are.
    "multiply": _multiply,
    "dot": _product,
    "convolution": _product,
    **dict.fromkeys(("add", "subtract", "maximum", "minimum"), _ranked(_every)),
    # Functions that are zero at zero.
    **dict.fromkeys(
        ("divide", "negate", "abs", "copy", "reduce-precision", "tanh", "sine", "sqrt", "sign"),
        _ranked(lambda zeros: zeros[0]),
    ),
    "convert": _converted,
    "select": _select,
    "reduce": _reduce,
    # What moves elements.
    "broadcast": _broadcast,
    "reshape": _reshape,
    "bitcast": _reshape,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
}
