"""Whether the shapes of a module's instructions fit each other, for HLO of unknown origin.

XLA verifies what it compiles; what comes from a file was never compiled. Its parser and loader count
operands, and believe the shapes that are written. What is checked here is what the front end relies on:
shapes of what hands its operands on, of what computes element by element, and of what calls. Everything
else is for the engine that compiles it. Tables are by opcode; layouts are ignored.

Source of the rules: XLA's ``hlo_verifier`` and ``shape_inference``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from stretto.collectives.types import ELEMENT_TYPES

from .graph import POINT_TO_POINT, START_COLLECTIVES, Instruction, Module
from .schema import PRIMITIVE_TYPES, TOKEN, TUPLE

# More elements than that are in no array: their bytes must fit 63 bits, in any type.
_MOST_ELEMENTS = 1 << 58
_PRED, _S32 = 1, 4

# What they give is there when their done has ended.
IN_FLIGHT = START_COLLECTIVES | POINT_TO_POINT | {"async-start", "async-update"}


def verify(module: Module) -> None:
    """Raise `InvalidProgramError`, naming the instruction, where shapes contradict each other.

    Raises `UnsupportedError` for a group of sends and receives, which nothing else here could be made of.
    """
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "async-start":
                _alone(instruction)
    for computation in module.computations:
        for instruction in computation.instructions:
            _possible(instruction.shape, instruction)
            count = _OPERANDS.get(instruction.opcode)
            if count is not None and not count[0] <= len(instruction.operands) <= count[1]:
                expected = str(count[0]) if count[0] == count[1] else f"at least {count[0]}"
                raise instruction.invalid(
                    f"has {len(instruction.operands)} operands, and needs {expected}"
                )
            for operand in instruction.operands:
                if _in_flight(operand) and not _may_end(instruction):
                    raise instruction.invalid(
                        f"reads {operand.name}, which is still in flight; read its -done instead"
                    )
            rule = _RULES.get(instruction.opcode)
            if rule is not None:
                rule(instruction)
        if _in_flight(computation.root):
            raise computation.root.invalid("it is a result, and still in flight")


def _alone(start: Instruction) -> None:
    """A send or receive is started by itself; XLA:GPU groups those that NCCL is to launch together."""
    called = [i for c in start.called for i in c.instructions if i.opcode in POINT_TO_POINT]
    if called:
        raise start.unsupported(
            f"it groups {', '.join(f'{i.opcode} {i.name}' for i in called)}, as XLA:GPU does at last; give "
            "the module before that, where each has a -done of its own"
        )


def _in_flight(instruction: Instruction) -> bool:
    return instruction.opcode in IN_FLIGHT


def _may_end(instruction: Instruction) -> bool:
    """Elements of a receive are read by a form of HLO without its done."""
    opcode = instruction.opcode
    return opcode.endswith("-done") or opcode in ("async-update", "get-tuple-element")


def spelled(shape: Any) -> str:
    """As HLO text writes it, without the layout."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(spelled, shape.tuple_shapes))})"
    if shape.element_type == TOKEN:
        return "token[]"
    name = PRIMITIVE_TYPES.get(shape.element_type, f"type {shape.element_type}")
    return f"{name}[{','.join(map(str, shape.dimensions))}]"


def same(one: Any, other: Any) -> bool:
    """Whether two shapes are equal but for layouts."""
    if one.element_type != other.element_type:
        return False
    if one.element_type == TUPLE:
        parts, others = one.tuple_shapes, other.tuple_shapes
        return len(parts) == len(others) and all(map(same, parts, others))
    return list(one.dimensions) == list(other.dimensions)


def _possible(shape: Any, where: Instruction) -> None:
    if shape.element_type == TUPLE:
        for part in shape.tuple_shapes:
            _possible(part, where)
        return
    if any(d < 0 for d in shape.dimensions) or prod(shape.dimensions) > _MOST_ELEMENTS:
        raise where.invalid(f"has the impossible shape {spelled(shape)}")
    memory = shape.layout.minor_to_major
    if memory and sorted(memory) != list(range(len(shape.dimensions))):
        raise where.invalid(f"has the impossible layout {list(memory)} of {spelled(shape)}")


def _expect(where: Instruction, found: Any, expected: Any, what: str) -> None:
    if not same(found, expected):
        raise where.invalid(f"{what} is {spelled(found)}, and should be {spelled(expected)}")


def _array(where: Instruction, operand: int) -> Any:
    """The shape of an operand, which must be an array."""
    shape = where.operands[operand].shape
    if shape.element_type in (TUPLE, TOKEN):
        raise where.invalid(f"operand {operand} is {spelled(shape)}, which is no array")
    return shape


def _is_array(where: Instruction) -> None:
    if where.shape.element_type in (TUPLE, TOKEN):
        raise where.invalid(f"its shape is {spelled(where.shape)}, which is no array")


def _same_as_operand(where: Instruction) -> None:
    _expect(where, where.shape, where.operands[0].shape, "its shape")


def _tuple(where: Instruction) -> None:
    parts = where.shape.tuple_shapes
    if where.shape.element_type != TUPLE or len(parts) != len(where.operands):
        raise where.invalid(
            f"its shape is {spelled(where.shape)}, for {len(where.operands)} operands"
        )
    for index, (part, operand) in enumerate(zip(parts, where.operands, strict=True)):
        _expect(where, part, operand.shape, f"element {index} of its shape")


def _element(where: Instruction) -> None:
    shape, index = where.operands[0].shape, where.proto.tuple_index
    if shape.element_type != TUPLE or not 0 <= index < len(shape.tuple_shapes):
        raise where.invalid(f"there is no element {index} in {spelled(shape)}")
    _expect(where, where.shape, shape.tuple_shapes[index], "its shape")


def _token(where: Instruction) -> None:
    if where.shape.element_type != TOKEN:
        raise where.invalid(f"its shape is {spelled(where.shape)}, and should be token[]")


def _add_dependency(where: Instruction) -> None:
    _same_as_operand(where)


def _elementwise(where: Instruction) -> None:
    """All operands have the result's dimensions; scalars may stand for all elements where HLO allows."""
    _is_array(where)
    scalars = {"clamp": (0, 2), "select": (0,)}.get(where.opcode, ())
    for index in range(len(where.operands)):
        shape = _array(where, index)
        fits = list(shape.dimensions) == list(where.shape.dimensions)
        if not fits and not (index in scalars and not shape.dimensions):
            raise where.invalid(
                f"operand {index} is {spelled(shape)}, and its shape is {spelled(where.shape)}"
            )
    own = where.shape.element_type
    for index in _OWN_TYPE.get(where.opcode, ()):
        if where.operands[index].shape.element_type != own:
            raise where.invalid(
                f"operand {index} is {spelled(where.operands[index].shape)}, and its shape is "
                f"{spelled(where.shape)}"
            )
    if where.opcode == "compare":
        one, other = (o.shape.element_type for o in where.operands)
        if one != other or own != _PRED:
            raise where.invalid("compares different types, or gives no pred")
    if where.opcode == "select" and where.operands[0].shape.element_type != _PRED:
        raise where.invalid(f"selects by {spelled(where.operands[0].shape)}, not by pred")


def _reshape(where: Instruction) -> None:
    _is_array(where)
    shape = _array(where, 0)
    if (
        prod(shape.dimensions) != prod(where.shape.dimensions)
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")


def _bitcast(where: Instruction) -> None:
    """Memory is read anew: there must be as much of it."""
    _is_array(where)
    sizes = [_bits(shape) for shape in (_array(where, 0), where.shape)]
    if sizes[0] != sizes[1]:
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(where.operands[0].shape)}"
        )


def _bits(shape: Any) -> int:
    name = PRIMITIVE_TYPES.get(shape.element_type)
    return (ELEMENT_TYPES[name].bits if name else 0) * prod(shape.dimensions)


def _broadcast(where: Instruction) -> None:
    _is_array(where)
    shape, axes = _array(where, 0), list(where.proto.dimensions)
    fits = (
        shape.element_type == where.shape.element_type
        and len(axes) == len(shape.dimensions)
        and len(axes) == len(set(axes))
        and all(0 <= a < len(where.shape.dimensions) for a in axes)
        and all(where.shape.dimensions[a] == d for a, d in zip(axes, shape.dimensions, strict=True))
    )
    if not fits:
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(shape)} with dimensions {axes}"
        )


def _transpose(where: Instruction) -> None:
    _is_array(where)
    shape, axes = _array(where, 0), list(where.proto.dimensions)
    if sorted(axes) != list(range(len(shape.dimensions))) or (
        [shape.dimensions[a] for a in axes] != list(where.shape.dimensions)
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(shape)} with dimensions {axes}"
        )


def _slice(where: Instruction) -> None:
    _is_array(where)
    shape, bounds = _array(where, 0), where.proto.slice_dimensions
    sizes = [-(-(b.limit - b.start) // b.stride) if b.stride > 0 else -1 for b in bounds]
    inside = len(bounds) == len(shape.dimensions) and all(
        0 <= b.start <= b.limit <= d for b, d in zip(bounds, shape.dimensions, strict=True)
    )
    if not inside or sizes != list(where.shape.dimensions):
        raise where.invalid(f"cannot cut {spelled(where.shape)} out of {spelled(shape)}")


def _reverse(where: Instruction) -> None:
    _same_as_operand(where)
    if any(not 0 <= a < len(where.shape.dimensions) for a in where.proto.dimensions):
        raise where.invalid(f"{spelled(where.shape)} lacks some of {list(where.proto.dimensions)}")


def _iota(where: Instruction) -> None:
    _is_array(where)
    axes = list(where.proto.dimensions)
    if where.shape.dimensions and (
        len(axes) != 1 or not 0 <= axes[0] < len(where.shape.dimensions)
    ):
        raise where.invalid(f"{spelled(where.shape)} has no dimension {axes}")


def _concatenate(where: Instruction) -> None:
    _is_array(where)
    axes, own = list(where.proto.dimensions), list(where.shape.dimensions)
    if len(axes) != 1 or not 0 <= axes[0] < len(own):
        raise where.invalid(f"{spelled(where.shape)} has no dimension {axes}")
    total = 0
    for index in range(len(where.operands)):
        shape = _array(where, index)
        size = list(shape.dimensions)
        if len(size) != len(own) or any(size[a] != own[a] for a in range(len(own)) if a != axes[0]):
            raise where.invalid(f"operand {index}, {spelled(shape)}, does not fit in")
        total += size[axes[0]]
    if total != own[axes[0]]:
        raise where.invalid(f"its operands have {total} rows, and {spelled(where.shape)} has not")


def _pad(where: Instruction) -> None:
    _is_array(where)
    shape, config = _array(where, 0), where.proto.padding_config.dimensions
    if _array(where, 1).dimensions or len(config) != len(shape.dimensions):
        raise where.invalid("its padding does not fit its operand")
    sizes = [
        d + c.edge_padding_low + c.edge_padding_high + max(d - 1, 0) * c.interior_padding
        for d, c in zip(shape.dimensions, config, strict=True)
    ]
    if sizes != list(where.shape.dimensions) or any(c.interior_padding < 0 for c in config):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")


def _dynamic_slice(where: Instruction) -> None:
    _is_array(where)
    shape, sizes = _array(where, 0), list(where.proto.dynamic_slice_sizes)
    if (
        sizes != list(where.shape.dimensions)
        or len(sizes) != len(shape.dimensions)
        or any(not 0 <= s <= d for s, d in zip(sizes, shape.dimensions, strict=True))
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(f"cannot cut {spelled(where.shape)} out of {spelled(shape)}")
    _indices(where, 1, len(sizes))


def _dynamic_update_slice(where: Instruction) -> None:
    _is_array(where)
    _same_as_operand(where)
    whole, update = _array(where, 0), _array(where, 1)
    if len(update.dimensions) != len(whole.dimensions) or any(
        u > d for u, d in zip(update.dimensions, whole.dimensions, strict=True)
    ):
        raise where.invalid(f"cannot put {spelled(update)} into {spelled(whole)}")
    _indices(where, 2, len(whole.dimensions))


def _indices(where: Instruction, first: int, rank: int) -> None:
    """A scalar for each dimension, or in an old form one vector of them."""
    shapes = [_array(where, i) for i in range(first, len(where.operands))]
    vector = len(shapes) == 1 and list(shapes[0].dimensions) == [rank]
    if not vector and (len(shapes) != rank or any(s.dimensions for s in shapes)):
        raise where.invalid(f"its {len(shapes)} indices do not fit {rank} dimensions")


def _dot(where: Instruction) -> None:
    """Batch dimensions, then those of the left and of the right operand that are not contracted."""
    _is_array(where)
    numbers = where.proto.dot_dimension_numbers
    sides = (
        (_array(where, 0), numbers.lhs_batch_dimensions, numbers.lhs_contracting_dimensions),
        (_array(where, 1), numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions),
    )
    found: list[list[list[int]]] = []
    for shape, batch, contracted in sides:
        taken = [*batch, *contracted]
        if len(set(taken)) != len(taken) or any(not 0 <= a < len(shape.dimensions) for a in taken):
            raise where.invalid(f"{spelled(shape)} lacks some of the dimensions {taken}")
        free = [d for a, d in enumerate(shape.dimensions) if a not in taken]
        sizes = [[shape.dimensions[a] for a in axes] for axes in (batch, contracted)]
        found.append([*sizes, free])
    (batch, contracted, left), (other_batch, other_contracted, right) = found
    if (
        batch != other_batch
        or contracted != other_contracted
        or [*batch, *left, *right] != list(where.shape.dimensions)
    ):
        shapes = " and ".join(spelled(shape) for shape, _, _ in sides)
        raise where.invalid(f"cannot make {spelled(where.shape)} of {shapes}")


def _reduce(where: Instruction) -> None:
    """Arrays and then as many initial values; the result lacks the dimensions that are reduced."""
    _called(where, 1)
    number = len(where.operands) // 2
    if len(where.operands) != 2 * number or len(where.called[0].parameters) != 2 * number:
        raise where.invalid("has not one initial value, and two parameters, for each array")
    shape, axes = _array(where, 0), set(where.proto.dimensions)
    if any(not 0 <= a < len(shape.dimensions) for a in axes):
        raise where.invalid(f"{spelled(shape)} lacks some of the dimensions {sorted(axes)}")
    kept = [d for a, d in enumerate(shape.dimensions) if a not in axes]
    results = where.shape.tuple_shapes if where.shape.element_type == TUPLE else [where.shape]
    if len(results) != number or any(list(r.dimensions) != kept for r in results):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")
    for index in range(len(where.operands)):
        operand = _array(where, index)
        if list(operand.dimensions) != (list(shape.dimensions) if index < number else []):
            raise where.invalid(f"operand {index} is {spelled(operand)}")


def _map(where: Instruction) -> None:
    _called(where, 1)
    _is_array(where)
    if len(where.called[0].parameters) != len(where.operands):
        raise where.invalid("has not one parameter for each operand")
    for index in range(len(where.operands)):
        if list(_array(where, index).dimensions) != list(where.shape.dimensions):
            raise where.invalid(f"operand {index} has not the dimensions of its result")


def _called(where: Instruction, number: int) -> None:
    if len(where.called) != number:
        raise where.invalid(f"calls {len(where.called)} computations, not {number}")


def _reducer(where: Instruction) -> None:
    """all-reduce and reduce-scatter: a computation of two scalars for every operand, or two for all."""
    _called(where, 1)
    parameters = where.called[0].parameters
    if len(parameters) not in (2, 2 * len(where.operands)):
        raise where.invalid(f"its reducer {where.called[0].name} has not two parameters")
    for part in parameters:
        if part.shape.element_type in (TUPLE, TOKEN) or part.shape.dimensions:
            raise where.invalid(f"its reducer {where.called[0].name} is not of scalars")


def _collective(where: Instruction) -> None:
    if where.opcode.startswith(("all-reduce", "reduce-scatter")):
        _reducer(where)
    if where.opcode.startswith("collective-permute") and where.proto.dynamic_slice_sizes:
        return  # the in-place form, whose operands may be tuples: refused as such when it is read
    for operand in where.operands:
        if operand.shape.element_type == TUPLE:
            raise where.invalid(f"operand {operand.name} is a tuple; give its elements instead")


def _call(where: Instruction) -> None:
    (called,) = where.called
    for parameter, operand in zip(called.parameters, where.operands, strict=True):
        _expect(where, operand.shape, parameter.shape, f"operand {operand.name}")
    if where.opcode != "async-start":
        _expect(where, where.shape, called.root.shape, "its shape")
        return
    # ((operands), result, contexts…); other asynchronous ops have shapes of their own.
    if where.shape.element_type != TUPLE or len(where.shape.tuple_shapes) < 2:
        raise where.invalid(f"its shape is {spelled(where.shape)}, not of operands and result")
    _expect(where, where.shape.tuple_shapes[1], called.root.shape, "the result in its shape")


def _while(where: Instruction) -> None:
    body, condition = where.called
    _same_as_operand(where)
    _expect(where, body.parameters[0].shape, where.shape, f"the parameter of {body.name}")
    _expect(where, body.root.shape, where.shape, f"the result of {body.name}")
    _expect(where, condition.parameters[0].shape, where.shape, f"the parameter of {condition.name}")
    _scalar(where, condition.root.shape, _PRED, f"the result of {condition.name}")


def _conditional(where: Instruction) -> None:
    selector, *arguments = where.operands
    if len(arguments) != len(where.called) or not where.called:
        raise where.invalid(
            f"has {len(arguments)} operands behind the selector, for {len(where.called)} branches"
        )
    by_bool = selector.shape.element_type == _PRED
    _scalar(where, selector.shape, _PRED if by_bool else _S32, "its selector")
    if by_bool and len(where.called) != 2:
        raise where.invalid(f"chooses by pred among {len(where.called)} branches")
    for argument, called in zip(arguments, where.called, strict=True):
        _expect(where, argument.shape, called.parameters[0].shape, f"operand {argument.name}")
        _expect(where, called.root.shape, where.shape, f"the result of {called.name}")


def _scalar(where: Instruction, shape: Any, type: int, what: str) -> None:
    if shape.element_type != type or shape.dimensions:
        raise where.invalid(f"{what} is {spelled(shape)}, and should be {PRIMITIVE_TYPES[type]}[]")


def _transfer(where: Instruction) -> None:
    """send and recv: (payload, context, token)."""
    parts = where.shape.tuple_shapes
    if (
        where.shape.element_type != TUPLE
        or len(parts) != 3
        or parts[0].element_type == TOKEN
        or parts[2].element_type != TOKEN
    ):
        raise where.invalid(f"its shape is {spelled(where.shape)}, not of payload, u32[], token[]")
    if where.operands[-1].shape.element_type != TOKEN:
        raise where.invalid("its last operand is not a token")
    if where.opcode == "send":
        _expect(where, where.operands[0].shape, parts[0], "what it sends")


def _begun(where: Instruction, *opcodes: str) -> Any:
    """The shape of the start that a done ends."""
    start = where.operands[0]
    while start.opcode == "async-update" and start.operands:
        start = start.operands[0]
    if start.opcode in ("get-tuple-element", "parameter") and start.shape.element_type == TUPLE:
        raise where.unsupported(
            f"ends {start.describe()}, which was started in another iteration or computation; a start and "
            "its done must be in one, as they are before XLA's passes that pipeline sends and receives"
        )
    if start.opcode not in opcodes:
        raise where.invalid(f"ends {start.describe()}, and should end {' or '.join(opcodes)}")
    return start.shape


def _recv_done(where: Instruction) -> None:
    begun = _begun(where, "recv")
    parts = where.shape.tuple_shapes
    if where.shape.element_type != TUPLE or len(parts) != 2 or parts[1].element_type != TOKEN:
        raise where.invalid(f"its shape is {spelled(where.shape)}, not of payload and token[]")
    _expect(where, parts[0], begun.tuple_shapes[0], "what it receives")


def _send_done(where: Instruction) -> None:
    _begun(where, "send")
    _token(where)


def _done_of_pair(where: Instruction) -> None:
    """Ends a start whose shape is of operands and results."""
    name = where.opcode.removesuffix("-done")
    begun = _begun(where, "async-start" if name == "async" else f"{name}-start")
    parts = begun.tuple_shapes
    if begun.element_type != TUPLE or len(parts) < 2:
        raise where.invalid(f"ends what has the shape {spelled(begun)}, not of operands, results")
    _expect(where, where.shape, parts[1], "its shape")


def _all_reduce_done(where: Instruction) -> None:
    _expect(where, where.shape, _begun(where, "all-reduce-start"), "its shape")


def _async_update(where: Instruction) -> None:
    _begun(where, "async-start")
    _same_as_operand(where)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MANY = 1 << 62
_UNARY = _words(
    "abs cbrt ceil convert cosine count-leading-zeros erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic negate not "
    "popcnt real round-nearest-afz round-nearest-even rsqrt sign sine sqrt tan tanh "
    "reduce-precision acos acosh asin asinh atanh cosh sinh"
)
_BINARY = _words(
    "add and atan2 compare complex divide maximum minimum multiply or power remainder "
    "shift-left shift-right-arithmetic shift-right-logical subtract xor"
)
_SAME_TYPE = _words(
    "add and divide maximum minimum multiply or power remainder subtract xor shift-left "
    "shift-right-arithmetic shift-right-logical atan2"
)
# Operands whose element type is the result's.
_OWN_TYPE = {
    **dict.fromkeys(_SAME_TYPE, (0, 1)),
    **dict.fromkeys(("negate", "not", "sign"), (0,)),
    "select": (1, 2),
    "clamp": (0, 1, 2),
}

# How many operands, at least and at most.
_OPERANDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("parameter", "constant", "iota", "partition-id", "replica-id"), (0, 0)),
    **dict.fromkeys(_UNARY, (1, 1)),
    **dict.fromkeys(_BINARY, (2, 2)),
    **dict.fromkeys(("select", "clamp"), (3, 3)),
    **dict.fromkeys(
        _words(
            "bitcast bitcast-convert broadcast copy copy-start copy-done get-tuple-element "
            "opt-barrier reshape reverse slice transpose while all-reduce-done all-gather-done "
            "collective-permute-done send-done recv recv-done async-update async-done"
        ),
        (1, 1),
    ),
    **dict.fromkeys(("add-dependency", "pad", "send", "dot", "gather"), (2, 2)),
    **dict.fromkeys(
        _words(
            "all-reduce all-reduce-start all-gather all-gather-start reduce-scatter all-to-all "
            "collective-permute collective-permute-start collective-broadcast concatenate "
            "dynamic-slice conditional"
        ),
        (1, _MANY),
    ),
    **dict.fromkeys(("dynamic-update-slice", "reduce"), (2, _MANY)),
    "ragged-all-to-all": (6, 6),
}

_RULES: dict[str, Callable[[Instruction], None]] = {
    **dict.fromkeys((*_UNARY, *_BINARY, "select", "clamp"), _elementwise),
    **dict.fromkeys(("copy", "opt-barrier"), _same_as_operand),
    **dict.fromkeys(("call", "fusion", "async-start"), _call),
    **dict.fromkeys(("send", "recv"), _transfer),
    **dict.fromkeys(("all-gather-done", "collective-permute-done", "async-done"), _done_of_pair),
    **dict.fromkeys(
        _words(
            "all-reduce all-reduce-start all-gather all-gather-start reduce-scatter all-to-all "
            "collective-permute collective-permute-start collective-broadcast ragged-all-to-all"
        ),
        _collective,
    ),
    "tuple": _tuple,
    "get-tuple-element": _element,
    "after-all": _token,
    "add-dependency": _add_dependency,
    "reshape": _reshape,
    **dict.fromkeys(("bitcast", "bitcast-convert"), _bitcast),
    "broadcast": _broadcast,
    "transpose": _transpose,
    "slice": _slice,
    "reverse": _reverse,
    "iota": _iota,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "dot": _dot,
    "reduce": _reduce,
    "map": _map,
    "while": _while,
    "conditional": _conditional,
    "recv-done": _recv_done,
    "send-done": _send_done,
    "all-reduce-done": _all_reduce_done,
    "async-update": _async_update,
}
