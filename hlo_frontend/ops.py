"""One table of ops, `OPS`, read through `op_of`: the facts about each opcode that the front end uses.

To add an op, add its row. The facts of a row allow optimizations: to move the op, to leave it out, to fuse
it. An opcode without a row is `UNKNOWN`, for which nothing is allowed: each element of its results needs all
of its operands, it computes, is a kernel of its own, gives no zeros, and runs even if nothing reads its
results.

Five modules have rules in code for what a row cannot say, each in a table by opcode; an op without a rule is
treated by its row alone: `passes.valid.needs` (which elements of the operands are read, where that depends
on indices), `passes.valid.known` (values that are known when the program is compiled),
`passes.bytes.batches` (along which dimensions it is independent), `flops` (operations that are not one for
each element) and `verify` (shapes of modules that people hand in).
"""

from __future__ import annotations

from dataclasses import dataclass

MANY = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Op:
    """The facts about an op.

    ``operands``: the least and the largest number of its operands; None if not known.
    ``elementwise``: each element of its result is computed from the same element of every operand, or from an
    operand that is a scalar.
    ``moves``: each element of its result is one of its first operand, converted or negated at most.
    ``zero_if``: if these operands are positive zeros, so is its result; None if there is no such rule.
    ``arithmetic``: it computes itself, and does not only move data or call computations.
    ``fuses``: a compiler makes one kernel of it and the ops around it.
    ``reads_part``: it reads as much of its first operand as it gives.
    ``in_place``: result i takes the memory of operand i.
    ``renames``: its result is its operand's memory, read with another shape or type.
    ``hands_on``: its results are its operands, one by one.
    ``stateful``: it reads or writes state outside the program.
    """

    operands: tuple[int, int] | None = None
    elementwise: bool = False
    moves: bool = False
    zero_if: slice | None = None
    arithmetic: bool = True
    fuses: bool = False
    reads_part: bool = False
    in_place: bool = False
    renames: bool = False
    hands_on: bool = False
    stateful: bool = False


UNKNOWN = Op(stateful=True)

_FIRST, _BOTH, _ALL = slice(0, 1), slice(0, 2), slice(None)
_NONE, _ONE, _TWO, _THREE, _SOME = (0, 0), (1, 1), (2, 2), (3, 3), (1, MANY)


def _rows(names: str, op: Op) -> dict[str, Op]:
    return dict.fromkeys(names.split(), op)


OPS: dict[str, Op] = {
    # Element by element.
    **_rows(
        "abs acos acosh asin asinh atanh cbrt ceil cosh cosine count-leading-zeros erf exponential "
        "exponential-minus-one floor imag is-finite log log-plus-one logistic not popcnt real "
        "round-nearest-afz round-nearest-even rsqrt sign sine sinh sqrt tan tanh",
        Op(operands=_ONE, elementwise=True, fuses=True),
    ),
    **_rows(
        "and atan2 compare complex divide maximum minimum multiply or power remainder shift-left "
        "shift-right-arithmetic shift-right-logical stochastic-convert subtract xor",
        Op(operands=_TWO, elementwise=True, fuses=True),
    ),
    "add": Op(operands=_TWO, elementwise=True, fuses=True, zero_if=_ALL),
    "clamp": Op(operands=_THREE, elementwise=True, fuses=True),
    "convert": Op(operands=_ONE, elementwise=True, fuses=True, moves=True, zero_if=_FIRST),
    "map": Op(operands=_SOME, fuses=True),
    "negate": Op(operands=_ONE, elementwise=True, fuses=True, moves=True),
    "reduce-precision": Op(operands=_ONE, elementwise=True, fuses=True, moves=True, zero_if=_FIRST),
    "select": Op(operands=_THREE, elementwise=True, fuses=True, zero_if=slice(1, 3)),
    # What moves data.
    "bitcast": Op(operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True, renames=True),
    "bitcast-convert": Op(operands=_ONE, arithmetic=False, fuses=True, renames=True),
    "broadcast": Op(operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True),
    "concatenate": Op(operands=_SOME, zero_if=_ALL, arithmetic=False, fuses=True),
    "copy": Op(
        operands=_ONE, elementwise=True, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True,
        hands_on=True,
    ),
    "dynamic-slice": Op(
        operands=_SOME, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True, reads_part=True
    ),
    "dynamic-update-slice": Op(operands=(2, MANY), zero_if=_BOTH, arithmetic=False, in_place=True),
    "gather": Op(operands=_TWO, arithmetic=False, fuses=True, reads_part=True),
    "pad": Op(operands=_TWO, zero_if=_ALL, arithmetic=False, fuses=True),
    "reshape": Op(operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True, renames=True),
    "reverse": Op(operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True),
    "slice": Op(
        operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True, reads_part=True
    ),
    "transpose": Op(operands=_ONE, moves=True, zero_if=_FIRST, arithmetic=False, fuses=True),
    # What has no array as operand, or hands on tuples and tokens.
    **_rows(
        "constant iota parameter partition-id replica-id",
        Op(operands=_NONE, arithmetic=False, fuses=True),
    ),
    "add-dependency": Op(operands=_TWO, arithmetic=False, fuses=True),
    "after-all": Op(arithmetic=False, fuses=True),
    "domain": Op(operands=_ONE, arithmetic=False),
    "get-tuple-element": Op(operands=_ONE, arithmetic=False, fuses=True),
    "opt-barrier": Op(operands=_ONE, arithmetic=False, fuses=True, hands_on=True),
    "tuple": Op(arithmetic=False, fuses=True, hands_on=True),
    # Sums over elements.
    "reduce": Op(operands=(2, MANY), fuses=True),
    "convolution": Op(operands=_TWO),
    "dot": Op(operands=_TWO),
    "reduce-window": Op(operands=(2, MANY)),
    "scaled-dot": Op(operands=(3, 4)),
    "scatter": Op(operands=(3, MANY), in_place=True),
    "select-and-scatter": Op(operands=_THREE),
    # Algorithms.
    **_rows("batch-norm-grad batch-norm-inference", Op(operands=(5, 5))),
    "batch-norm-training": Op(operands=_THREE),
    "cholesky": Op(operands=_ONE),
    "fft": Op(operands=_ONE),
    "rng-bit-generator": Op(operands=_ONE),
    "sort": Op(operands=_SOME),
    "topk": Op(operands=_ONE),
    "triangular-solve": Op(operands=_TWO),
    # Shapes and state.
    "dynamic-reshape": Op(operands=_SOME, arithmetic=False),
    **_rows("get-dimension-size set-dimension-size", Op(operands=(1, 2), arithmetic=False, fuses=True)),
    **_rows("infeed outfeed", Op(arithmetic=False, stateful=True)),
    "rng": Op(stateful=True),
    "rng-get-and-update-state": Op(operands=_NONE, stateful=True),
    # Calls.
    **_rows("call fusion async-start", Op(arithmetic=False)),
    "conditional": Op(operands=_SOME, arithmetic=False),
    "custom-call": Op(),
    "while": Op(operands=_ONE, arithmetic=False),
    # What goes to other devices, and the ends of what is under way.
    **_rows(
        "all-gather all-gather-start all-reduce all-reduce-start all-to-all collective-broadcast "
        "collective-permute collective-permute-start reduce-scatter",
        Op(operands=_SOME),
    ),
    "ragged-all-to-all": Op(operands=(6, 6)),
    "recv": Op(operands=_ONE),
    "send": Op(operands=_TWO),
    **_rows(
        "all-gather-done all-reduce-done async-done async-update collective-permute-done copy-done "
        "copy-start recv-done send-done",
        Op(operands=_ONE, arithmetic=False),
    ),
}  # fmt: skip


def op_of(opcode: str) -> Op:
    """The row of an opcode, `UNKNOWN` if there is none."""
    return OPS.get(opcode, UNKNOWN)
