"""Rules of instructions that call computations, and of collectives."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Instruction
from ..schema import TOKEN, TUPLE
from .shapes import PRED, S32, expect, expect_called, expect_scalar, same_as_operand, spelled, words


def _reducer(where: Instruction) -> None:
    """all-reduce and reduce-scatter: a computation of two scalars for every operand, or two for all."""
    expect_called(where, 1)
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
        expect(where, operand.shape, parameter.shape, f"operand {operand.name}")
    if where.opcode != "async-start":
        expect(where, where.shape, called.root.shape, "its shape")
        return
    # ((operands), result, contexts…); other asynchronous ops have shapes of their own.
    if where.shape.element_type != TUPLE or len(where.shape.tuple_shapes) < 2:
        raise where.invalid(f"its shape is {spelled(where.shape)}, not of operands and result")
    expect(where, where.shape.tuple_shapes[1], called.root.shape, "the result in its shape")


def _while(where: Instruction) -> None:
    body, condition = where.called
    same_as_operand(where)
    expect(where, body.parameters[0].shape, where.shape, f"the parameter of {body.name}")
    expect(where, body.root.shape, where.shape, f"the result of {body.name}")
    expect(where, condition.parameters[0].shape, where.shape, f"the parameter of {condition.name}")
    expect_scalar(where, condition.root.shape, PRED, f"the result of {condition.name}")


def _conditional(where: Instruction) -> None:
    selector, *arguments = where.operands
    if len(arguments) != len(where.called) or not where.called:
        raise where.invalid(
            f"has {len(arguments)} operands behind the selector, for {len(where.called)} branches"
        )
    by_bool = selector.shape.element_type == PRED
    expect_scalar(where, selector.shape, PRED if by_bool else S32, "its selector")
    if by_bool and len(where.called) != 2:
        raise where.invalid(f"chooses by pred among {len(where.called)} branches")
    for argument, called in zip(arguments, where.called, strict=True):
        expect(where, argument.shape, called.parameters[0].shape, f"operand {argument.name}")
        expect(where, called.root.shape, where.shape, f"the result of {called.name}")


RULES: dict[str, Callable[[Instruction], None]] = {
    **dict.fromkeys(("call", "fusion", "async-start"), _call),
    **dict.fromkeys(
        words(
            "all-reduce all-reduce-start all-gather all-gather-start reduce-scatter all-to-all "
            "collective-permute collective-permute-start collective-broadcast ragged-all-to-all"
        ),
        _collective,
    ),
    "while": _while,
    "conditional": _conditional,
}
