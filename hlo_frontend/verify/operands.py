"""How many operands instructions have, by opcode."""

from __future__ import annotations

from .shapes import words

_MANY = 1 << 62
UNARY = words(
    "abs cbrt ceil convert cosine count-leading-zeros erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic negate not "
    "popcnt real round-nearest-afz round-nearest-even rsqrt sign sine sqrt tan tanh "
    "reduce-precision acos acosh asin asinh atanh cosh sinh"
)
BINARY = words(
    "add and atan2 compare complex divide maximum minimum multiply or power remainder "
    "shift-left shift-right-arithmetic shift-right-logical subtract xor"
)

# How many operands, at least and at most.
OPERANDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("parameter", "constant", "iota", "partition-id", "replica-id"), (0, 0)),
    **dict.fromkeys(UNARY, (1, 1)),
    **dict.fromkeys(BINARY, (2, 2)),
    **dict.fromkeys(("select", "clamp"), (3, 3)),
    **dict.fromkeys(
        words(
            "bitcast bitcast-convert broadcast copy copy-start copy-done get-tuple-element "
            "opt-barrier reshape reverse slice transpose while all-reduce-done all-gather-done "
            "collective-permute-done send-done recv recv-done async-update async-done"
        ),
        (1, 1),
    ),
    **dict.fromkeys(("add-dependency", "pad", "send", "dot", "gather"), (2, 2)),
    **dict.fromkeys(
        words(
            "all-reduce all-reduce-start all-gather all-gather-start reduce-scatter all-to-all "
            "collective-permute collective-permute-start collective-broadcast concatenate "
            "dynamic-slice conditional"
        ),
        (1, _MANY),
    ),
    **dict.fromkeys(("dynamic-update-slice", "reduce"), (2, _MANY)),
    "ragged-all-to-all": (6, 6),
}
