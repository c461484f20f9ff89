"""The table of ops: no op of what JAX compiles is missing, and an op without a row may do anything."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from overlap.overlap_support import block, table

from stretto.hlo_frontend import flops as counted
from stretto.hlo_frontend import verify
from stretto.hlo_frontend.aliases import find_aliases
from stretto.hlo_frontend.carve import SegmentPlan, carve
from stretto.hlo_frontend.flops import arithmetic, flops, flops_of
from stretto.hlo_frontend.graph import COLLECTIVES, DONE_COLLECTIVES, Module
from stretto.hlo_frontend.ops import OPS, UNKNOWN, op_of
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.passes.order import order
from stretto.hlo_frontend.passes.pseudo_tokens import remove_pseudo_tokens
from stretto.hlo_frontend.passes.valid import known, needs
from stretto.hlo_frontend.passes.valid.dependence import Dependence
from stretto.hlo_frontend.passes.valid.trace import Forward
from stretto.hlo_frontend.schema import HloModuleProto
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.values import BlockGraph, Node

LLAMA = Path(__file__).parent / "overlap" / "data"
MADE_UP = "made-up"


def described(opcode: str, module: str) -> BlockGraph:
    """The graph of a module, with ``opcode`` in the place of its ``abs``."""
    proto = HloModuleProto.FromString(parse_hlo_text(module))
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "abs":
                instruction.opcode = opcode
    return block(Module.parse(proto.SerializeToString()))


def only(opcode: str, operand: str = "parameter(0)") -> tuple[BlockGraph, Node]:
    graph = described(
        opcode, f"HloModule m\nENTRY e {{\n p = s32[512] {operand}\n ROOT r = s32[512] abs(p)\n}}"
    )
    return graph, next(n for n in graph.nodes if n.instruction.opcode == opcode)


def test_an_op_without_a_row_has_no_property_that_makes_anything_possible() -> None:
    row = op_of(MADE_UP)
    assert row is UNKNOWN
    assert row.arithmetic
    assert row.stateful
    possible = (
        "elementwise",
        "moves",
        "zero_if",
        "fuses",
        "reads_part",
        "in_place",
        "renames",
        "hands_on",
    )
    assert not any(getattr(row, name) for name in possible)


def needed(opcode: str) -> np.ndarray:
    _, node = only(opcode)
    mask = np.zeros((1, 512), bool)
    mask[0, 3] = True
    ((_, found),) = needs.needs(node, [None], [mask], Dependence())
    return np.broadcast_to(found, mask.shape)


def test_an_op_without_a_row_reads_everything_for_one_element() -> None:
    assert needed("abs").sum() == 1
    assert needed(MADE_UP).all()


def test_the_results_of_an_op_without_a_row_depend_on_all_operands() -> None:
    text = """HloModule m
    ENTRY e {
      p = (f32[2], f32[2]) parameter(0)
      ROOT r = (f32[2], f32[2]) opt-barrier(p)
    }"""
    proto = HloModuleProto.FromString(parse_hlo_text(text))

    def leaves() -> list[frozenset[int]]:
        return Dependence().of_call(Module.parse(proto.SerializeToString()).entry.root)

    assert leaves() == [{0}, {1}]
    proto.computations[0].instructions[1].opcode = MADE_UP
    assert leaves() == [{0, 1}, {0, 1}]


def gives(opcode: str) -> tuple[bool, bool]:
    """Whether the value is known, and known to be zero, that an op makes of zeros."""
    graph = described(
        opcode,
        """HloModule m
        ENTRY e {
          z = s32[] constant(0)
          zs = s32[512] broadcast(z), dimensions={}
          ROOT r = s32[512] abs(zs)
        }""",
    )
    forward = Forward(1, 2, follow_zeros=True)
    trace = forward.program(graph)
    (result,) = graph.results
    return forward.known(trace, result) is not None, forward.zero(trace, result) is not None


def test_what_an_op_without_a_row_makes_of_zeros_is_not_known() -> None:
    assert gives("reverse") == (True, True)
    assert gives("abs") == (True, False)
    assert gives(MADE_UP) == (False, False)


def test_an_op_without_a_row_computes() -> None:
    counts = {}
    for opcode in (MADE_UP, "abs", "copy"):
        _, node = only("abs")
        node.instruction.opcode = opcode
        counts[opcode] = arithmetic([node.instruction]), flops(node.instruction)
    assert counts == {MADE_UP: (1, 512.0), "abs": (1, 512.0), "copy": (0, 0.0)}


def kernels(opcode: str) -> int:
    graph = described(
        opcode,
        """HloModule m
        ENTRY e {
          p = f32[512] parameter(0)
          a = f32[512] exponential(p)
          b = f32[512] abs(a)
          ROOT c = f32[512] exponential(b)
        }""",
    )
    return len(build(graph, table()).tasks)


def test_an_op_without_a_row_is_a_kernel_of_its_own() -> None:
    assert kernels("abs") == kernels("reshape") == 1
    assert kernels(MADE_UP) == 3


def aliases(opcode: str) -> dict[int, int]:
    graph, _ = only(opcode)
    (plan,) = [step for step in carve(graph, order(graph)).steps if isinstance(step, SegmentPlan)]
    return find_aliases(plan, graph.parameters)


def test_an_op_without_a_row_overwrites_no_operand() -> None:
    assert aliases("abs") == {0: 0}
    assert aliases(MADE_UP) == {}


def is_run(opcode: str) -> bool:
    """Whether a program runs an op whose result nothing reads."""
    graph = described(
        opcode,
        """HloModule m
        ENTRY e {
          p = f32[8] parameter(0)
          q = f32[8] abs(p)
          ROOT r = (f32[8]) tuple(p)
        }""",
    )
    return bool(carve(graph, order(graph)).steps)


def test_an_op_without_a_row_is_run_though_nothing_reads_it() -> None:
    assert not is_run("abs")
    assert is_run("rng")
    assert is_run(MADE_UP)


def is_order(opcode: str) -> bool:
    """Whether a zero of an earlier result, added behind an op, is known to be there for order alone."""
    return remove_pseudo_tokens(
        described(
            opcode,
            """HloModule m
            sum {
              l = f32[] parameter(0)
              r = f32[] parameter(1)
              ROOT s = f32[] add(l, r)
            }
            ENTRY e {
              p = f32[] parameter(0)
              q = f32[8] parameter(1)
              zero = f32[] constant(0)
              one = f32[] all-reduce(p), to_apply=sum, replica_groups={{0,1}}, channel_id=1,
                use_global_device_ids=true
              t = f32[] multiply(zero, one)
              u = f32[] abs(t)
              us = f32[8] broadcast(u), dimensions={}
              behind = f32[8] add(q, us)
              two = f32[8] all-reduce(behind), to_apply=sum, replica_groups={{0,1}}, channel_id=2,
                use_global_device_ids=true
              ROOT r = (f32[], f32[8]) tuple(one, two)
            }""",
        )
    )


def test_an_op_without_a_row_hands_on_no_order() -> None:
    assert is_order("negate")
    assert not is_order(MADE_UP)


RULES: dict[str, Sequence[str]] = {
    "flops": tuple(counted._RULES),
    "known": tuple(known._RULES),
    "needs": (*needs._RULES, *needs._CALLERS),
    "verify": tuple(verify._RULES),
    "collectives": tuple(COLLECTIVES | DONE_COLLECTIVES),
}


@pytest.mark.parametrize("name", RULES)
def test_every_op_with_a_rule_has_a_row(name: str) -> None:
    assert set(RULES[name]) <= OPS.keys()


def opcodes(module: Module) -> set[str]:
    return {i.opcode for c in module.computations for i in c.instructions}


@pytest.mark.parametrize("path", sorted(LLAMA.glob("*.gz")), ids=lambda path: path.name)
def test_every_op_of_compiled_modules_has_a_row(path: Path) -> None:
    data = gzip.decompress(path.read_bytes())
    if path.name.endswith(".txt.gz"):
        found = set(
            re.findall(
                r"^ *(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z-]*)\(", data.decode(), re.MULTILINE
            )
        )
    else:
        found = opcodes(Module.parse(data))
    assert "dot" in found
    assert found <= OPS.keys()


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def convolution(**options: Any) -> Callable[..., jax.Array]:
    return lambda x, w: lax.conv_general_dilated(x, w, **options)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()


IMAGE, KERNEL = ones(2, 3, 10, 10), ones(5, 3, 3, 3)
EVEN = {"window_strides": (1, 1), "padding": "SAME"}
SAME_AS_XLA: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dot": (jnp.dot, (ones(8, 16), ones(16, 4))),
    "batches of dots": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (ones(3, 8, 16), ones(3, 16, 4))),
    "convolution": (convolution(window_strides=(1, 1), padding="VALID"), (IMAGE, KERNEL)),
    "padding": (convolution(**EVEN), (IMAGE, KERNEL)),
    "negative padding": (
        convolution(window_strides=(1, 1), padding=((-1, 2), (0, -2))), (IMAGE, KERNEL)
    ),
    "strides": (convolution(window_strides=(2, 3), padding="SAME"), (ones(2, 3, 10, 11), KERNEL)),
    "groups": (convolution(**EVEN, feature_group_count=3), (ones(2, 6, 10, 10), ones(9, 2, 3, 3))),
    "groups of batches": (
        convolution(**EVEN, batch_group_count=2), (ones(4, 3, 10, 10), ones(6, 3, 3, 3))
    ),
    "dilations": (
        convolution(
            window_strides=(3, 2), padding=((3, 2), (5, 1)), lhs_dilation=(4, 3), rhs_dilation=(2, 3)
        ),
        (IMAGE, ones(5, 3, 3, 4)),
    ),
    "gradient": (jax.grad(lambda w, x: convolution(**EVEN)(x, w).sum()), (KERNEL, IMAGE)),
    "sum": (lambda x: x.sum(0), (ones(8, 16),)),
    "argmax": (lambda x: x.argmax(0), (ones(8, 16),)),
    "cumulative sum": (jnp.cumsum, (ones(64),)),
    "pooling": (pooled, (ones(8, 16),)),
    "gradient of pooling": (jax.grad(pooled), (ones(8, 16),)),
    "conversion": (lambda x: x.astype(jnp.bfloat16), (ones(8, 16),)),
    "selection": (lambda x: jnp.where(x > 0, x, 0), (ones(8, 16),)),
    "scatter": (lambda x, u: x.at[jnp.array([1, 2])].add(u), (ones(8, 16), ones(2, 16))),
    "sort": (lambda x: jnp.sort(x, 0), (ones(8, 16),)),
    "update": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (ones(8, 16), ones(2, 2), 1)),
    "branches": (lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x), (True, ones(8, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_XLA)
def test_flops_are_those_of_xlas_own_analysis(name: str) -> None:
    function, arguments = SAME_AS_XLA[name]
    lowered = jax.jit(function).lower(*arguments)
    module = Module.parse(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    analysis = lowered.cost_analysis()
    assert flops_of(module.entry.instructions) == analysis["flops"]
    assert opcodes(module) <= OPS.keys()
