"""Makes the gather before a Fourier transform of the dimension that is cut two all-to-alls around it.

XLA's partitioner gathers the whole array on every device, transforms all of it everywhere and cuts out each
device's part. Here each device exchanges its part of the dimension that is cut for a part of another one,
transforms that, and exchanges back: on ``n`` devices ``n / 2`` times fewer bytes, and ``1 / n`` of the work
and of the memory. A transform of several dimensions of which the first is cut is taken apart, in the order in
which XLA takes them: complex ones from the last to the first; of a real array the last, then the others from
the first on; to a real array from the first on.

Bits: those of XLA up to jaxlib 0.10, except that the inverse transform of several dimensions is scaled by the
first length and by the others one after the other, which rounds alike where the first is a power of two. From
0.12 on XLA rounds a row differently by how many it transforms at once, and so differently here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...graph import Instruction
from ...values import Node, Value
from .context import Context, Rewritten
from .own_parts import OwnPart, give_parts, own_parts, places
from .steps import Step, Transform, batched_of, emit, forward, of_part, part_of

# The most steps between a gather and a transform.
_LONGEST = 16


def exchange(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite ``node``; None if it stays."""
    collective = node.collective
    if collective is None or collective.kind is not Kind.ALL_GATHER or len(node.results) != 1:
        return None
    where = places(collective) if context.has_slices else None
    if where is None or len(where.place) != context.num_devices or node in editor.ordered:
        return None
    found = _transformed(editor, node)
    if found is None:
        return None
    result, steps = found
    *moves, transform = steps
    dimension = collective.dimension
    for step in moves:
        to = forward(step, dimension, where.parts)
        if to is None:
            return None
        dimension = to
    taken, others = own_parts(editor, context.known, result, where)
    if others or not taken or any(own.dimension != dimension or own.order for own in taken):
        return None
    plan = _planned(transform, dimension, where.parts)
    if plan is None:
        return None
    ahead = (*of_part(moves, collective.dimension, where.parts), *plan.ahead)
    _apply(editor, node, collective, replace(plan, ahead=ahead), taken, where.parts)
    return Rewritten(
        f"becomes two all-to-alls: around {transform.like.name} devices exchange their parts of the "
        "dimension that is cut for parts of another"
    )


def _transformed(editor: Editor, node: Node) -> tuple[Value, tuple[Step, ...]] | None:
    """What the only reader of a gather makes of it with a transform as its last step, and all the steps."""
    value, steps = node.results[0], tuple[Step, ...]()
    while len(steps) < _LONGEST:
        uses = editor.uses(value)
        reader = uses[0].node if len(uses) == 1 else None
        if reader is None or uses[0].value.barrier is not None:
            return None
        if reader.order or any(v.order for v in reader.operands):
            return None
        more = batched_of(reader)
        if more is None or any(step.opcode == "convert" for step in more):
            return None
        steps, value = steps + more, reader.results[0]
        if more[-1].opcode == "fft":
            return value, steps
    return None


@dataclass(frozen=True)
class _Plan:
    """Steps ahead of the first all-to-all, between the two, and behind the second. All-to-alls are along the
    first dimension."""

    ahead: tuple[Step, ...]
    between: tuple[Step, ...]
    behind: tuple[Step, ...]


def _planned(transform: Step, dimension: int, parts: int) -> _Plan | None:
    """The plan of a transform whose operand is cut along ``dimension``; None if there is none."""
    lengths, kind = transform.lengths, Transform(transform.transform)
    source, target = transform.source, transform.target
    if dimension != len(source.shape) - len(lengths) or target.shape[dimension] % parts:
        return None
    to_real = kind is Transform.IRFFT
    first, last = lengths[:1], lengths[1:]
    ahead, between, behind = (_Chain(transform.like) for _ in range(3))
    here = part_of(source, dimension, parts)
    ends = last[-1:] if kind is Transform.RFFT else last
    if last and not to_real:
        whole = (*source.shape[: dimension + 1], *target.shape[dimension + 1 :])
        parted = part_of(TensorType(target.dtype, whole), dimension, parts)
        here = ahead.fft(here, kind, ends, parted)
    other = _other(here, dimension, parts)
    if other is None:
        return None
    size = here.shape[other]
    if size % parts:
        here = ahead.resize("pad", here, other, -(-size // parts) * parts)
    # A part of another dimension for each device of the group, in front.
    shape, rank = here.shape, len(here.shape)
    cut = shape[other] // parts
    here = ahead.reshape(here, (*shape[:other], parts, cut, *shape[other + 1 :]))
    order = (other, *(d for d in range(rank + 1) if d != other))
    here = ahead.transpose(here, order)
    # All parts of the dimension, one behind the other, at the end.
    to_end = (*(1 + d for d in range(rank) if d != dimension), 0, 1 + dimension)
    here = between.transpose(here, to_end)
    shape = here.shape
    here = between.reshape(here, (*shape[:-2], shape[-2] * shape[-1]))
    if last:
        inverse = kind in (Transform.IFFT, Transform.IRFFT)
        of_first = Transform.IFFT if inverse else Transform.FFT
        here = between.fft(here, of_first, first, here)
    else:
        transformed = TensorType(target.dtype, (*here.shape[:-1], target.shape[dimension]))
        here = between.fft(here, kind, first, transformed)
    here = between.reshape(here, (*here.shape[:-1], parts, here.shape[-1] // parts))
    here = between.transpose(here, _inverse(to_end))
    # Back.
    here = behind.transpose(here, _inverse(order))
    shape = here.shape
    here = behind.reshape(here, (*shape[:other], shape[other] * cut, *shape[other + 2 :]))
    if size % parts:
        here = behind.resize("slice", here, other, size)
    if kind is Transform.RFFT:
        for middle, length in enumerate(last[:-1], dimension + 1):
            swapped = (*(d for d in range(rank) if d != middle), middle)
            here = behind.transpose(here, swapped)
            here = behind.fft(here, Transform.FFT, (length,), here)
            here = behind.transpose(here, _inverse(swapped))
    wanted = part_of(target, dimension, parts)
    if last and to_real:
        here = behind.fft(here, kind, last, wanted)
    assert here == wanted
    return _Plan(tuple(ahead.steps), tuple(between.steps), tuple(behind.steps))


def _other(type: TensorType, dimension: int, parts: int) -> int | None:
    """Another dimension that can be cut into parts, filled up if need be: not so far that more is sent than
    by the gather, but for a tenth."""
    others = [(d, n) for d, n in enumerate(type.shape) if d != dimension and n]
    whole = [d for d, n in others if n % parts == 0]
    filled = [d for d, n in others if 20 * -(-n // parts) <= 11 * n]
    return next(iter(whole + filled), None)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))


@dataclass
class _Chain:
    """Steps one after the other. Methods add one and give the type of its result."""

    like: Instruction
    steps: list[Step] = field(default_factory=list)

    def reshape(self, type: TensorType, shape: tuple[int, ...]) -> TensorType:
        return self._add(Step("reshape", type, TensorType(type.dtype, shape), self.like))

    def transpose(self, type: TensorType, permutation: tuple[int, ...]) -> TensorType:
        target = TensorType(type.dtype, tuple(type.shape[d] for d in permutation))
        return self._add(Step("transpose", type, target, self.like, permutation))

    def resize(self, opcode: str, type: TensorType, dimension: int, size: int) -> TensorType:
        shape = (*type.shape[:dimension], size, *type.shape[dimension + 1 :])
        return self._add(Step(opcode, type, TensorType(type.dtype, shape), self.like))

    def fft(
        self, type: TensorType, kind: Transform, lengths: tuple[int, ...], target: TensorType
    ) -> TensorType:
        return self._add(Step("fft", type, target, self.like, transform=int(kind), lengths=lengths))

    def _add(self, step: Step) -> TensorType:
        self.steps.append(step)
        return step.target


def _apply(
    editor: Editor,
    node: Node,
    collective: Collective,
    plan: _Plan,
    taken: Sequence[OwnPart],
    parts: int,
) -> None:
    nodes, operand = emit(plan.ahead, node.operands[0])
    editor.put_ahead(node, nodes)
    exchanged = _exchanged(collective, operand)
    result = Value(operand.type, node, 0)
    editor.change(node, [operand], [result], exchanged)
    nodes, operand = emit(plan.between, result)
    editor.put_behind(node, nodes)
    second = Node(node.kind, node.instruction, -1, [operand], node.order)
    second.collective = _exchanged(collective, operand)
    second.results = [Value(operand.type, second, 0)]
    editor.put_behind(node, [second])
    nodes, part = emit(plan.behind, second.results[0])
    editor.put_behind(node, nodes)
    give_parts(editor, node, part, taken, parts)


def _exchanged(collective: Collective, operand: Value) -> Collective:
    """The all-to-all of an operand along its first dimension."""
    assert operand.type is not None
    types = (operand.type,)
    return replace(collective, kind=Kind.ALL_TO_ALL, operands=types, results=types, dimension=0)
