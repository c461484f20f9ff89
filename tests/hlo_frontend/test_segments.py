"""Segments: equal ones are one, what is in them survives, donated ones work in place."""

from __future__ import annotations

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, manual, mesh
from interpreter import Interpreter, compile_segment
from jax import lax

from stretto.hlo_frontend.carve import carve
from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.segments import ModuleBuilder
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.program import Loop, Run, instructions
from stretto.runtime.program.check import check


def spd(a):
    return a @ jnp.swapaxes(a, -1, -2) + 4 * jnp.eye(4)


def while_with_id(a):
    return lax.fori_loop(0, 3, lambda i, c: c + lax.axis_index("x"), a)


OPS = {
    "dot": lambda a: a @ a,
    "convolution": lambda a: lax.conv(a[None], jnp.ones((2, a.shape[0], 2, 2)), (1, 1), "SAME"),
    "sort": lambda a: jnp.sort(a, 0),
    "argsort": lambda a: jnp.argsort(a, 1),
    "variadic reduce": lambda a: jnp.argmax(a, 1),
    "reduce-window": lambda a: lax.cumsum(a, 1),
    "select-and-scatter": jax.grad(
        lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID").sum()
    ),
    "gather": lambda a: a[jnp.array([1, 0, 3]), jnp.array([0, 2, 2])],
    "scatter": lambda a: a.at[jnp.array([1, 0]), jnp.array([0, 2])].add(1.0),
    "cholesky": lambda a: jnp.linalg.cholesky(spd(a)),
    "eigh": lambda a: jnp.linalg.eigh(spd(a))[0],
    "lu": lambda a: jnp.linalg.solve(spd(a), a),
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "triangular-solve": lambda a: lax.linalg.triangular_solve(
        jnp.tril(spd(a)), a, left_side=True, lower=True
    ),
    "threefry": lambda a: jax.random.normal(jax.random.key(0), (4,)) + a[0, 0],
    "rng-bit-generator": lambda a: (
        jax.random.bits(jax.random.key(0, impl="rbg"), (4,)).astype(jnp.float32) + a[0, 0]
    ),
    "topk": lambda a: lax.top_k(a, 2)[0],
    "fft": lambda a: jnp.abs(jnp.fft.rfft2(a)),
    "dynamic-slice": lambda a: lax.dynamic_slice(a, (1, 1, 1), (2, 2, 2)),
    "while": lambda a: lax.while_loop(lambda c: jnp.abs(c).sum() < 50, lambda c: c * 2, a),
    "scan": lambda a: lax.scan(lambda c, x: (c + x, c * x), a[0], a)[1],
    "conditional": lambda a: lax.cond(a.sum() > 0, lambda a: a, lambda a: a * 2, a),
    "complex": lambda a: jnp.real((a + 1j * a) ** 2),
    "bf16": lambda a: a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16),
    "f8": lambda a: a.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 2,
    "int4": lambda a: a.astype(jnp.int4).astype(jnp.int32),
    "pred": lambda a: jnp.logical_not(a > 0),
    "erf_inv": lambda a: lax.erf_inv(a / 9),
    "id in a loop": while_with_id,
    "barrier": lambda a: lax.optimization_barrier((a * 2, a + 1))[0] * 3,
    "ragged-dot": lambda a: lax.ragged_dot(a[0], jnp.stack([a[1], a[2]]), jnp.array([2, 2])),
    "attention": lambda a: jax.nn.dot_product_attention(a[None], a[None], a[None]),
}


@pytest.mark.quick(
    "dot",
    "sort",
    "variadic reduce",
    "gather",
    "scatter",
    "cholesky",
    "threefry",
    "fft",
    "while",
    "conditional",
    "bf16",
    "int4",
    "barrier",
)
@pytest.mark.parametrize("name", OPS)
def test_ops_before_and_after_a_collective(name):
    op = OPS[name]

    def f(a):
        first = op(a)
        total = lax.psum(a.sum(), "x")
        return first.astype(jnp.float32), op(a * 1.5 + total * 0).astype(jnp.float32)

    x = np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32)
    judge(manual(f, mesh(2), P("x"), (P("x"), P("x"))), mesh(2), P("x"), x)


def test_what_enters_the_barrier_of_a_recomputation_late_is_kept_apart_too():
    """A plan may compute behind it with one operand before another is made, in one segment."""
    text = """HloModule m
ENTRY main {
  p = f32[8] parameter(0)
  a = f32[8] negate(p)
  b = f32[8] exponential(p)
  in = (f32[8], f32[8]) tuple(a, b)
  out = (f32[8], f32[8]) opt-barrier(in), metadata={op_name="remat2"}
  a1 = f32[8] get-tuple-element(out), index=0
  b1 = f32[8] get-tuple-element(out), index=1
  c = f32[8] cosine(a1)
  d = f32[8] add(b1, a1)
  ROOT e = f32[8] add(c, d)
}"""
    block = flatten(Module.parse(parse_hlo_text(text)).entry, CollectiveReader(1, 1))
    nodes = {node.instruction.name: node for node in block.nodes}
    for order, barriers in (("abcde", [2]), ("acbde", [1, 1])):
        (segment,) = carve(block, [nodes[name] for name in order]).steps
        (main,) = ModuleBuilder().plan(segment).computations
        made = {i.id: i for i in main.instructions}
        found = [i for i in main.instructions if i.opcode == "opt-barrier"]
        assert [len(i.shape.tuple_shapes) for i in found] == barriers
        # What is added comes out of barriers.
        add = next(i for i in main.instructions if i.opcode == "add")
        assert [made[k].opcode for k in add.operand_ids] == ["get-tuple-element"] * 2


def test_layers_that_are_alike_share_their_segments():
    def f(x, ws):
        for i in range(6):
            x = jnp.tanh(lax.psum(x @ ws[i], "x"))
        return x

    ws = np.ones((6, 8, 8), np.float32)
    program = compiled(
        manual(f, mesh(2), (P(), P()), P()), np.ones((4, 8), np.float32), ws, num_devices=2
    ).program
    runs = [i for i in instructions(program.body) if isinstance(i, Run)]
    assert len(runs) == 7
    assert len(program.segments) <= 3 + 5  # which layer of `ws` is sliced differs


def test_compiling_twice_gives_the_same_program():
    f = manual(
        lambda x: lax.psum(jnp.sin(x) @ x.T, "x") + lax.pmax(x.sum(), "x"), mesh(2), P("x"), P("x")
    )
    x = np.ones((8, 8), np.float32)
    assert compiled(f, x, num_devices=2).program == compiled(f, x, num_devices=2).program


def test_what_a_loop_donates_is_updated_in_place():
    """XLA aliases the donated stack to its update: the compiled segment holds no second one."""

    def f(x):
        def step(c, _):
            c = lax.psum(c, "x") * 0.5
            return c, c

        return lax.scan(step, x, None, length=64)[1]

    x = np.ones((2, 1024), np.float32)
    program = compiled(manual(f, mesh(2), P("x"), P(None, "x")), x, num_devices=2).program
    (loop,) = [i for i in program.body.instructions if isinstance(i, Loop)]
    updates = [
        program.segments[i.segment]
        for i in loop.body.instructions
        if isinstance(i, Run) and i.donated
    ]
    (segment,) = updates
    stats = compile_segment(segment).get_compiled_memory_stats()
    stack = 64 * 1024 * 4
    assert stats.alias_size_in_bytes >= stack
    assert stats.temp_size_in_bytes < stack


LLAMA = Path(__file__).parents[3] / "shared" / "hlo"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fwd_8x8_L32_unroll", "train_8x8_L32_scan"])
def test_a_real_model(name):
    path = LLAMA / f"llama_manual_{name}.pre_scheduler.pb.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there: the dumps are too large for the repository")
    program = compile_hlo(gzip.decompress(path.read_bytes()), 1, 64).program
    check(program)
    runs = [i for i in instructions(program.body) if isinstance(i, Run)]
    assert len(program.segments) < 30
    if "unroll" in name:
        assert len(runs) > 100


@pytest.mark.parametrize(
    ("shape", "layout", "to", "out"),
    [
        ((2, 3), (1, 0), (2, 3), (1, 0)),
        ((2, 3), (1, 0), (6,), (0,)),
        ((2, 3), (1, 0), (3, 2), (0, 1)),
        ((2, 3), (0, 1), (3, 2), (1, 0)),
        ((6,), (0,), (3, 2), (0, 1)),
    ],
)
def test_bitcasts_to_another_type_may_lie_otherwise(shape, layout, to, out):
    """XLA makes one of a bitcast to integers, as of a sign, and a reshape behind it."""

    def written(of, dimensions, layout):
        return f"{of}[{','.join(map(str, dimensions))}]{{{','.join(map(str, layout))}}}"

    text = f"""HloModule m
        ENTRY e {{
          given = {written("f32", shape, range(len(shape))[::-1])} parameter(0)
          lies = {written("f32", shape, layout)} copy(given)
          ROOT bits = {written("s32", to, out)} bitcast(lies)
        }}"""
    x = -np.arange(1, 7, dtype=np.float32).reshape(shape)
    memory = np.ascontiguousarray(x.transpose(layout[::-1])).reshape(-1).view(np.int32)
    expected = memory.reshape([to[d] for d in out[::-1]]).transpose(np.argsort(out[::-1]))
    ((found,),) = Interpreter(compile_hlo(parse_hlo_text(text), 1, 1).program).run([x])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layout", [(1, 0), (0, 1)])
@pytest.mark.parametrize(
    ("type", "to", "out"),
    [
        ("u8", (2, 4, 4), (2, 1, 0)),
        ("u8", (8, 4), (0, 1)),
        ("s16", (16,), (0,)),
        ("f64", (2, 2), (1, 0)),
        ("f64", (2, 2), (0, 1)),
        ("f64", (4,), (0,)),
    ],
)
def test_bitcasts_to_elements_of_another_size_may_lie_otherwise(layout, type, to, out):
    """A bitcast reinterprets memory, whatever it takes the elements for."""

    def written(of, dimensions, layout):
        return f"{of}[{','.join(map(str, dimensions))}]{{{','.join(map(str, layout))}}}"

    text = f"""HloModule m
        ENTRY e {{
          given = {written("f32", (2, 4), (1, 0))} parameter(0)
          lies = {written("f32", (2, 4), layout)} copy(given)
          ROOT bits = {written(type, to, out)} bitcast(lies)
        }}"""
    x = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    memory = np.ascontiguousarray(x.transpose(layout[::-1])).reshape(-1)
    memory = memory.view({"u8": np.uint8, "s16": np.int16, "f64": np.float64}[type])
    expected = memory.reshape([to[d] for d in out[::-1]]).transpose(np.argsort(out[::-1]))
    ((found,),) = Interpreter(compile_hlo(parse_hlo_text(text), 1, 1).program).run([x])
    np.testing.assert_array_equal(found, expected)
