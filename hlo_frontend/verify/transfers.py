"""Rules for asynchronous instructions: sends, receives, starts and their dones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph import POINT_TO_POINT, START_COLLECTIVES, Instruction
from ..schema import TOKEN, TUPLE
from .shapes import expect, expect_token, same_as_operand, spelled

# Instructions whose results exist only when their done has ended.
IN_FLIGHT = START_COLLECTIVES | POINT_TO_POINT | {"async-start", "async-update", "copy-start"}


def check_alone(start: Instruction) -> None:
    """Refuse groups of sends and receives, which XLA:GPU makes so that NCCL launches them together."""
    called = [i for c in start.called for i in c.instructions if i.opcode in POINT_TO_POINT]
    if called:
        raise start.unsupported(
            f"it groups {', '.join(f'{i.opcode} {i.name}' for i in called)}, as XLA:GPU does at last; give "
            "the module before that, where each has a -done of its own"
        )


def in_flight(instruction: Instruction) -> bool:
    return instruction.opcode in IN_FLIGHT


def may_read(instruction: Instruction, operand: Instruction) -> bool:
    """Elements of a receive are read by a form of HLO without its done."""
    if instruction.opcode == "get-tuple-element":
        return operand.opcode == "recv"
    return instruction.opcode.endswith("-done") or instruction.opcode == "async-update"


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
        expect(where, where.operands[0].shape, parts[0], "what it sends")


def _begun(where: Instruction, *opcodes: str) -> Any:
    """The shape of the start to which a done belongs."""
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
    expect(where, parts[0], begun.tuple_shapes[0], "what it receives")


def _send_done(where: Instruction) -> None:
    _begun(where, "send")
    expect_token(where)


def _done_of_pair(where: Instruction) -> None:
    """Ends a start whose shape is of operands and results."""
    name = where.opcode.removesuffix("-done")
    begun = _begun(where, "async-start" if name == "async" else f"{name}-start")
    parts = begun.tuple_shapes
    if begun.element_type != TUPLE or len(parts) < 2:
        raise where.invalid(f"ends what has the shape {spelled(begun)}, not of operands, results")
    expect(where, where.shape, parts[1], "its shape")


def _all_reduce_done(where: Instruction) -> None:
    expect(where, where.shape, _begun(where, "all-reduce-start"), "its shape")


def _copy_start(where: Instruction) -> None:
    """(copy, original, context)"""
    parts = where.shape.tuple_shapes
    if where.shape.element_type != TUPLE or len(parts) < 2:
        raise where.invalid(f"its shape is {spelled(where.shape)}, not of copy, original, u32[]")
    for part in parts[:2]:
        expect(where, part, where.operands[0].shape, "what it copies")


def _copy_done(where: Instruction) -> None:
    expect(where, where.shape, _begun(where, "copy-start").tuple_shapes[0], "its shape")


def _async_update(where: Instruction) -> None:
    _begun(where, "async-start")
    same_as_operand(where)


RULES: dict[str, Callable[[Instruction], None]] = {
    **dict.fromkeys(("send", "recv"), _transfer),
    **dict.fromkeys(("all-gather-done", "collective-permute-done", "async-done"), _done_of_pair),
    "copy-start": _copy_start,
    "copy-done": _copy_done,
    "recv-done": _recv_done,
    "send-done": _send_done,
    "all-reduce-done": _all_reduce_done,
    "async-update": _async_update,
}
