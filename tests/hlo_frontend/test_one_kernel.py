"""Segments that are one kernel: every operation that they may have, against JAX's CPU backend.

A function of JAX is the only segment of a region without collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executed import engine
from jax import lax

from stretto.hlo_frontend import one_kernel, stablehlo
from stretto.hlo_frontend.region_module import _merged
from stretto.runtime.program import Segment

Results = list[np.ndarray]


def lowered(f: Callable[..., Any], *arrays: np.ndarray) -> str:
    with jax.default_device(jax.devices("cpu")[0]):
        return str(jax.jit(f).lower(*arrays).compiler_ir("stablehlo"))


def expected(f: Callable[..., Any], *arrays: np.ndarray) -> Results:
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(a) for a in jax.tree.leaves(jax.jit(f)(*arrays))]


def region(text: str) -> Segment:
    """A region that only calls this module."""
    with stablehlo.parsed(text) as module:
        signature = stablehlo.signature(module)
        part = Segment(signature.inputs, signature.outputs, stablehlo.bytecode(module))
        taken, given = str(stablehlo.main(module).type).removeprefix("(").split(") -> ")
        types = given.strip("()")
    names = [f"%a{i}" for i in range(len(part.inputs))]
    typed = ", ".join(f"{n}: {t}" for n, t in zip(names, taken.split(", "), strict=True))
    left, results = "%r", "%r"
    if len(part.outputs) > 1:
        left = f"%r:{len(part.outputs)}"
        results = ", ".join(f"%r#{i}" for i in range(len(part.outputs)))
    whole = f"""module {{
      func.func public @main({typed}) -> ({types}) {{
        {left} = func.call @s0_main({", ".join(names)}) : ({taken}) -> ({types})
        return {results} : {types}
      }}
      func.func private @s0_main({taken}) -> ({types})
    }}"""
    return Segment(part.inputs, part.outputs, _merged(whole, [part], [0], [0]))


def run(segment: Segment, arrays: Sequence[np.ndarray], *, is_one: bool = True) -> Results:
    """Its results. ``is_one``: whether its call is to be one kernel."""
    runner = engine()
    loaded = runner.compile(segment)
    (compiled,) = loaded.executable.hlo_modules()
    assert ('xla_cpu_small_call="true"' in compiled.to_string()) == is_one
    inputs = [runner.put(a, t, 0) for a, t in zip(arrays, segment.inputs, strict=True)]
    return [np.array(runner.host_view(a)) for a in loaded.run(0, inputs)]


def same(got: Results, wanted: Results) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=1e-6)


def check(f: Callable[..., Any], *arrays: np.ndarray) -> None:
    arrays = tuple(map(np.ascontiguousarray, arrays))
    segment = region(lowered(f, *arrays))
    with stablehlo.parsed(segment.module) as module:
        assert "dot_general" not in str(module)
    same(run(segment, arrays), expected(f, *arrays))


X = np.linspace(-2.5, 3.5, 24, dtype=np.float32).reshape(4, 6)
Y = np.linspace(0.3, 1.9, 24, dtype=np.float32).reshape(4, 6)[::-1].copy()


def floats(x: Any, y: Any) -> list[Any]:
    unary = (
        jnp.abs, jnp.ceil, jnp.cos, jnp.exp, jnp.expm1, jnp.floor, jnp.sin, jnp.tanh, jnp.tan, jnp.sign,
        jnp.negative, jnp.isfinite, lax.logistic, lax.cbrt, lax.round, jnp.round,
    )  # fmt: skip
    positive = (jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt)
    binary = (
        jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.arctan2, lax.rem,
        jnp.less, jnp.equal,
    )  # fmt: skip
    return [
        *(f(x) for f in unary),
        *(f(y) for f in positive),
        *(f(x, y) for f in binary),
        lax.pow(y, x),
        lax.clamp(jnp.float32(0.5), x, jnp.float32(1)),
        jnp.where(x > y, x, y),
    ]


def integers(a: Any, b: Any) -> list[Any]:
    c = jnp.abs(b) % 7
    return [
        a + b, a - b, a * b, a // (c + 1), a % (c + 1), a & b, a | b, a ^ b, ~a, a << c, a >> c,
        lax.shift_right_logical(a, c), lax.clz(a), lax.population_count(a), jnp.minimum(a, b), jnp.sign(a),
        a.astype(jnp.float32), a.astype(jnp.int8), a.astype(jnp.uint16), a > b,
        jnp.logical_xor(a > 0, b > 0), jnp.logical_not(a > 0),
        lax.bitcast_convert_type(a.astype(jnp.int32), jnp.float32) > 0,
    ]  # fmt: skip


def complexes(x: Any, y: Any) -> list[Any]:
    z = lax.complex(x, y)
    return [
        jnp.real(z * (z + 1)),
        jnp.imag(jnp.exp(z)),
        lax.div(z, lax.add(z, jnp.complex64(2))),
        z - jnp.conj(z),
    ]


def moved(x: Any, y: Any) -> list[Any]:
    i = jnp.int32(2) + (x[0, 0] > 100)
    return [
        x.T + 1, x.reshape(3, 8) * 2, x[::-1, ::2] + y[:, ::2], jnp.concatenate([x, y * 2], 1),
        jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0), jnp.broadcast_to(x[1], (5, 6)) + 1,
        lax.dynamic_slice(x, (i, 1), (2, 3)), lax.dynamic_update_slice(x, y[:2, :3], (i, i)),
        x[jnp.array([3, 0, 3])], jnp.take_along_axis(x, jnp.array([[1], [2], [0], [5]]), 1),
        jnp.arange(6.0) * x, lax.optimization_barrier(x + y),
    ]  # fmt: skip


def reduced(x: Any, y: Any) -> list[Any]:
    return [
        x.sum(), x.sum(0), x.max(1), (x > 1).any(0), (x > 1).all(1), y.prod(1), jnp.argmax(x, 1), x.min(),
        jnp.mean(x * y, 0),
    ]  # fmt: skip


def controlled(x: Any, y: Any) -> list[Any]:
    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, a = state
        a = lax.cond(a.sum() > 3, lambda: a * 0.5, lambda: a + y)
        a = lax.fori_loop(0, i, lambda j, b: b + j, a)
        return i + 1, lax.dynamic_update_slice(a, x[:1], (i % 4, 0))

    count, end = lax.while_loop(lambda s: (s[0] < 9) & (s[1].sum() < 500), step, (jnp.int32(0), x))
    chosen = lax.switch(count % 3, [lambda: x, lambda: y, lambda: x - y])
    return [count, end, chosen]


@pytest.mark.quick("floats", "moved")
@pytest.mark.parametrize("f", [floats, complexes, moved, reduced, controlled])
def test_operations(f: Callable[..., Any]) -> None:
    check(f, X, Y)


@pytest.mark.quick("int8", "uint32")
@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32", "int16"])
def test_integers(dtype: str) -> None:
    a = np.arange(-60, 60, 5).astype(dtype)
    check(integers, a, np.roll(a, 7))


DOTS = [
    ((4, 6), (6, 3), (((1,), (0,)), ((), ()))),
    ((6, 4), (3, 6), (((0,), (1,)), ((), ()))),
    ((2, 4, 6), (6, 2, 3), (((2,), (0,)), ((0,), (1,)))),
    ((5, 2, 4, 3), (3, 2, 5), (((3, 0), (0, 2)), ((1,), (1,)))),
    ((7,), (7,), (((0,), (0,)), ((), ()))),
    ((3,), (4,), (((), ()), ((), ()))),
]


@pytest.mark.parametrize(("left", "right", "numbers"), DOTS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dots_are_sums(left: Any, right: Any, numbers: Any, dtype: Any) -> None:
    random = np.random.default_rng(len(left))
    a, b = random.random(left).astype(dtype), random.random(right).astype(dtype)

    def f(a: Any, b: Any) -> Any:
        return jnp.sin(lax.dot_general(jnp.cos(a) + 1, b - 0.5, numbers)) * 2

    with jax.enable_x64(True):
        check(f, a, b)


def prepared(f: Callable[..., Any], *arrays: Any) -> bool:
    with stablehlo.parsed(lowered(f, *arrays)) as module:
        return one_kernel.prepare(module)


def test_what_is_no_kernel_of_its_own() -> None:
    def some(x: Any) -> Any:
        return jnp.sin(x) * jnp.cos(x) + x / 2

    most = one_kernel.MOST_BYTES // 4
    assert prepared(some, jnp.ones(most))
    assert not prepared(some, jnp.ones(most + 1))  # its threads are worth something
    assert not prepared(lambda x: x + 1, X)  # one kernel anyway
    assert not prepared(lambda x: jnp.sort(some(x)), X)
    assert not prepared(lambda x: some(x).at[jnp.array([1, 1])].add(1), X)
    assert prepared(lambda x: some(x).sum(), jnp.ones(1024))
    assert not prepared(lambda x: some(x).sum(), jnp.ones(1025))  # XLA may call a library
    assert not prepared(lambda x: some(x) @ jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert not prepared(lambda x: some(x).astype(jnp.bfloat16) + 1, X)
    assert not prepared(
        lambda x: jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(X.shape, X.dtype), some(x)), X
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [15, 16])  # 3,840 products and 4,096
@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((8, 32), (32, 0), (((1,), (0,)), ((), ()))),
        ((32, 8), (32, 0), (((0,), (0,)), ((), ()))),
        ((32, 8), (0, 32), (((0,), (1,)), ((), ()))),
    ],
)
def test_dots_that_xla_calls_a_library_for(
    left: Any, right: Any, numbers: Any, columns: int, dtype: Any
) -> None:
    """What is prepared compiles as one kernel."""
    random = np.random.default_rng(0)
    a, b = (random.random([d or columns for d in shape]).astype(dtype) for shape in (left, right))

    def f(a: Any, b: Any) -> Any:
        return jnp.sin(lax.dot_general(jnp.cos(a) + 1, b - 0.5, numbers) / 16) * 2

    with jax.enable_x64(True):
        assert prepared(f, a, b) == (columns == 15)
        if columns == 15:
            check(f, a, b)


def test_what_xla_refuses_is_compiled_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel, "_MOST_REDUCED", 1 << 20)

    def some(x: Any) -> Any:
        return (jnp.sin(x) * jnp.cos(x) + x / 2).max() + jnp.arange(3.0)

    arrays = (np.linspace(0, 1, 1 << 14, dtype=np.float32),)
    segment = region(lowered(some, *arrays))
    assert b"xla_cpu_small_call" in segment.module
    same(run(segment, arrays, is_one=False), expected(some, *arrays))


def test_a_constant_operand_that_is_folded_away_within_leaves_a_kernel() -> None:
    """As the 0 that a loop's count begins with, where whether to go on is computed before the loop, too. The
    process ended: XLA compared 0 with 640 and left a parameter without a use."""

    def goes_on(x: Any, count: Any) -> Any:
        return (count < 640) & (jnp.abs(jnp.sin(x) * 2 - jnp.cos(x)) > 1).any()

    x = np.linspace(0, 1, 8, dtype=np.float32)
    text = lowered(goes_on, x, np.int32(0))
    with stablehlo.parsed(text) as module:
        signature = stablehlo.signature(module)
        part = Segment(signature.inputs, signature.outputs, stablehlo.bytecode(module))
    whole = """module {
      func.func public @main(%x: tensor<8xf32>) -> (tensor<i1>, tensor<i32>) {
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %some = stablehlo.constant dense<10> : tensor<i32>
        %first = func.call @s0_main(%x, %zero) : (tensor<8xf32>, tensor<i32>) -> tensor<i1>
        %r:2 = stablehlo.while(%on = %first, %n = %zero) : tensor<i1>, tensor<i32>
          cond {
            stablehlo.return %on : tensor<i1>
          } do {
            %m = stablehlo.add %n, %some : tensor<i32>
            %more = func.call @s0_main(%x, %m) : (tensor<8xf32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %more, %m : tensor<i1>, tensor<i32>
          }
        return %r#0, %r#1 : tensor<i1>, tensor<i32>
      }
      func.func private @s0_main(tensor<8xf32>, tensor<i32>) -> tensor<i1>
    }"""
    outputs = (*part.outputs, part.inputs[1])
    segment = Segment(part.inputs[:1], outputs, _merged(whole, [part], [0], [0]))
    on, count = run(segment, [x])
    assert (on, count) == (False, 640)


def test_an_index_that_can_only_be_0_leaves_a_kernel() -> None:
    """XLA takes rows of all there are from the first one on, whatever the index says. The process ended."""

    def f(x: Any, i: Any, j: Any) -> Any:
        return jnp.sin(lax.dynamic_slice(x * 2, (i[0], j[0]), (4, 3)) + 1)

    check(f, X, np.int32([2]), np.int32([1]))


def results_of(f: Callable[..., Any], *arrays: Any) -> int:
    """How many results the prepared function of a module has."""
    with stablehlo.parsed(lowered(f, *arrays)) as module:
        assert one_kernel.prepare(module)
        return len(stablehlo.main(module).type.results)


def test_only_what_may_be_left_is_read() -> None:
    """Arrays that are updated in place would be copied to be read."""

    def updated(x: Any, y: Any) -> Any:
        return lax.dynamic_update_slice(x, jnp.sin(y[:2] * 2) + jnp.cos(y[2:]), (1, 0))

    def looked_up(x: Any, table: Any, i: Any) -> Any:
        return jnp.sin(lax.dynamic_slice(x * 2, (table[i[0]], 0), (2, 3)) + 1)

    assert results_of(updated, X, Y) == 1
    assert results_of(looked_up, X, np.arange(4), np.int32([1])) == 2
    check(looked_up, X, np.arange(4, dtype=np.int32), np.int32([1]))


def test_a_long_computation_of_an_index() -> None:
    """Each step reads the one before it more than once: there are 2^200 ways through them."""

    def f(x: Any, i: Any) -> Any:
        for _ in range(100):
            i = (i * i + (i ^ 3)) & 3
        return jnp.sin(lax.dynamic_slice(x * 2, (i[0], 0), (2, 3)))

    check(f, X, np.int32([1]))


LOOP = """
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %five = stablehlo.constant dense<5> : tensor<i32>
  %r:4 = stablehlo.while(%a = %x, %b = %y, %c = %y, %n = %zero) : tensor<4xf32>, tensor<4xf32>,
      tensor<4xf32>, tensor<i32>
    cond {
      %less = stablehlo.compare LT, %n, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %less : tensor<i1>
    } do {
      %sine = stablehlo.sine %a : tensor<4xf32>
      %next = stablehlo.add %sine, %a : tensor<4xf32>
      %other = stablehlo.multiply %b, %c : tensor<4xf32>
      %m = stablehlo.add %n, %one : tensor<i32>
      stablehlo.return %next, %other, %c, %m : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<i32>
    }
  %end = stablehlo.cosine %r#0 : tensor<4xf32>"""
BRANCH = """
  %zeros = stablehlo.constant dense<0.0> : tensor<4xf32>
  %positive = stablehlo.compare GT, %x, %zeros : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
  %first = stablehlo.slice %positive [0:1] : (tensor<4xi1>) -> tensor<1xi1>
  %p = stablehlo.reshape %first : (tensor<1xi1>) -> tensor<i1>
  %r:2 = "stablehlo.if"(%p) ({
    %sine = stablehlo.sine %x : tensor<4xf32>
    stablehlo.return %sine, %y : tensor<4xf32>, tensor<4xf32>
  }, {
    %more = stablehlo.exponential %y : tensor<4xf32>
    stablehlo.return %x, %more : tensor<4xf32>, tensor<4xf32>
  }) : (tensor<i1>) -> (tensor<4xf32>, tensor<4xf32>)
  %end = stablehlo.cosine %r#0 : tensor<4xf32>"""
CALL = """
  %r:2 = func.call @both(%x, %y) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %cosine = stablehlo.cosine %r#0 : tensor<4xf32>
  %end = stablehlo.add %cosine, %cosine : tensor<4xf32>"""
BOTH = """
func.func private @both(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %sine = stablehlo.sine %x : tensor<4xf32>
  %more = stablehlo.exponential %y : tensor<4xf32>
  return %sine, %more : tensor<4xf32>, tensor<4xf32>
}"""


@pytest.mark.parametrize("body", [LOOP, BRANCH, CALL], ids=["loop", "branch", "call"])
def test_what_is_handed_on_for_nobody_leaves_a_kernel(body: str) -> None:
    """The process ended."""
    text = f"""module {{
      func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {{{body}
        return %end : tensor<4xf32>
      }}{BOTH if body is CALL else ""}
    }}"""
    with stablehlo.parsed(text) as module:
        assert one_kernel.prepare(module)
        assert len(stablehlo.main(module).type.results) == 2
    x = np.float32([0.5, -1, 2, 3])
    wanted = {
        LOOP: lambda x: np.cos(functools.reduce(lambda a, _: np.sin(a) + a, range(5), x)),
        BRANCH: lambda x: np.cos(np.sin(x)),
        CALL: lambda x: 2 * np.cos(np.sin(x)),
    }[body](x)
    same(run(region(text), [x, np.ones(4, np.float32)]), [wanted])


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "uint64", "float32", "float64", "complex64"]
)
def test_an_array_of_which_nothing_is_left_leaves_a_kernel(dtype: str) -> None:
    """Of rows of which those are taken that are all overwritten."""

    def f(x: Any, y: Any) -> Any:
        rows = lax.dynamic_update_slice(y, x.astype(y.dtype), (0, 0))
        return jnp.cos(jnp.sin((rows != 0).astype(jnp.float32) * 3) + 1)

    with jax.enable_x64(True):
        check(f, X, Y.astype(dtype))
