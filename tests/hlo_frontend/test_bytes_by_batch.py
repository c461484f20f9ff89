"""Ops that work batch by batch, where XLA gathers all of their operand: each device computes a part.

Every row of the table of ops (`passes.bytes.batches`) is in a module by hand: gathered, computed, and cut; it
must give the same bits as the module as it is written, and send nothing. Programs of JAX are compared with
JAX's CPU backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge_program, kinds, mesh, same, shards
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding
from test_bytes import ALL, both, stays

N = 4
HEAD = """HloModule m, num_partitions=4

less {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}
by_first {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  c = s32[] parameter(2)
  d = s32[] parameter(3)
  ROOT e = pred[] compare(a, b), direction=LT
}
sum {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] add(a, b)
}
least {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] minimum(a, b)
}
twice {
  a = s32[] parameter(0)
  ROOT b = s32[] add(a, a)
}
at_least {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=GE
}
"""

# What follows from x, which is gathered, and y, which each device has whole: the type of the result r, and
# the dimension of which every device reads its part. One of the names x[d] is the gathered dimension.
BATCHES = {
    "abs": ("s32[8,6] {0}", "s32[8,6]", "r = s32[8,6] abs(x)", 0),
    "compare": ("s32[8,6] {0}", "pred[8,6]", "r = pred[8,6] compare(x, y), direction=LT", 0),
    "select by a scalar": (
        "s32[6,8] {1}",
        "s32[6,8]",
        "p0 = s32[1,1] slice(y), slice={[0:1],[0:1]}\n  p1 = s32[] reshape(p0)\n"
        "  p2 = pred[] compare(p1, zero), direction=LT\n  r = s32[6,8] select(p2, x, y)",
        1,
    ),
    "broadcast": ("s32[8] {0}", "s32[3,8]", "r = s32[3,8] broadcast(x), dimensions={1}", 1),
    "transpose": ("s32[8,6] {0}", "s32[6,8]", "r = s32[6,8] transpose(x), dimensions={1,0}", 1),
    "reshape": ("s32[8,6] {0}", "s32[4,2,6]", "r = s32[4,2,6] reshape(x)", 0),
    "bitcast": ("s32[8,6] {0}", "s32[6,8]", "r = s32[6,8]{0,1} bitcast(x)", 1),
    "bitcast-convert": ("s32[8,6] {0}", "u8[8,6,4]", "r = u8[8,6,4] bitcast-convert(x)", 0),
    "reverse": ("s32[8,6] {0}", "s32[8,6]", "r = s32[8,6] reverse(x), dimensions={1}", 0),
    "slice": ("s32[8,6] {0}", "s32[8,3]", "r = s32[8,3] slice(x), slice={[0:8],[1:6:2]}", 0),
    "dynamic-slice": (
        "s32[8,6] {0}",
        "s32[8,3]",
        "r = s32[8,3] dynamic-slice(x, one, one), dynamic_slice_sizes={8,3}",
        0,
    ),
    "dynamic-update-slice": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "u = s32[8,2] slice(y), slice={[0:8],[0:2]}\n"
        "  r = s32[8,6] dynamic-update-slice(x, u, one, one)",
        0,
    ),
    "pad": ("s32[8,6] {0}", "s32[8,15]", "r = s32[8,15] pad(x, one), padding=0_0x1_3_1", 0),
    "concatenate": (
        "s32[8,6] {0}",
        "s32[8,12]",
        "r = s32[8,12] concatenate(x, y), dimensions={1}",
        0,
    ),
    "gather of whole columns": (
        "s32[8,6] {0}",
        "s32[3,8]",
        "i0 = s32[1,3] slice(y), slice={[0:1],[0:3]}\n  i = s32[3] reshape(i0)\n"
        "  r = s32[3,8] gather(x, i), offset_dims={1}, collapsed_slice_dims={1}, start_index_map={1}, "
        "index_vector_dim=1, slice_sizes={8,1}",
        1,
    ),
    "gather by indices that are cut": (
        "s32[8] {0}",
        "s32[8,6]",
        "r = s32[8,6] gather(y, x), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,6}",
        0,
    ),
    "gather with batches": (
        "s32[8,6] {0}",
        "s32[8,3]",
        "i = s32[8,3] slice(y), slice={[0:8],[0:3]}\n"
        "  r = s32[8,3] gather(x, i), offset_dims={}, collapsed_slice_dims={1}, start_index_map={1}, "
        "operand_batching_dims={0}, start_indices_batching_dims={0}, index_vector_dim=2, slice_sizes={1,1}",
        0,
    ),
    "scatter of whole columns": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "i0 = s32[1,3] slice(y), slice={[0:1],[0:3]}\n  i = s32[3] reshape(i0)\n"
        "  u = s32[8,3] slice(y), slice={[0:8],[0:3]}\n"
        "  r = s32[8,6] scatter(x, i, u), update_window_dims={0}, inserted_window_dims={1}, "
        "scatter_dims_to_operand_dims={1}, index_vector_dim=1, to_apply=sum",
        0,
    ),
    "scatter with batches": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "i = s32[8,3] slice(y), slice={[0:8],[0:3]}\n  u = s32[8,3] slice(y), slice={[0:8],[3:6]}\n"
        "  r = s32[8,6] scatter(x, i, u), update_window_dims={}, inserted_window_dims={1}, "
        "scatter_dims_to_operand_dims={1}, input_batching_dims={0}, scatter_indices_batching_dims={0}, "
        "index_vector_dim=2, to_apply=sum",
        0,
    ),
    "reduce": (
        "s32[6,8] {1}",
        "s32[8]",
        "r = s32[8] reduce(x, one), dimensions={0}, to_apply=sum",
        0,
    ),
    "reduce-window": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "r = s32[8,6] reduce-window(x, zero), window={size=1x6 pad=0_0x5_0}, to_apply=sum",
        0,
    ),
    "select-and-scatter": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "u = s32[8,3] slice(y), slice={[0:8],[0:3]}\n"
        "  r = s32[8,6] select-and-scatter(x, u, zero), window={size=1x2 stride=1x2}, select=at_least, "
        "scatter=sum",
        0,
    ),
    "sort": ("s32[8,6] {0}", "s32[8,6]", "r = s32[8,6] sort(x), dimensions={1}, to_apply=less", 0),
    "sort with others": (
        "s32[8,6] {0}",
        "s32[8,6]",
        "t = (s32[8,6], s32[8,6]) sort(x, y), dimensions={1}, is_stable=true, to_apply=by_first\n"
        "  r = s32[8,6] get-tuple-element(t), index=1",
        0,
    ),
    "map": ("s32[8,6] {0}", "s32[8,6]", "r = s32[8,6] map(x), dimensions={0,1}, to_apply=twice", 0),
    "dot, batches": (
        "s32[8,6] {0}",
        "s32[8]",
        "r = s32[8] dot(x, y), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}",
        0,
    ),
    "dot, rows": (
        "s32[8,6] {0}",
        "s32[8,8]",
        "r = s32[8,8] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        0,
    ),
    "dot, columns": (
        "s32[8,6] {0}",
        "s32[8,8]",
        "r = s32[8,8] dot(y, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        1,
    ),
    "convolution, images": (
        "s32[8,6] {0}",
        "s32[8,1,6]",
        "i = s32[8,1,6] reshape(x)\n  k0 = s32[1,3] slice(y), slice={[0:1],[0:3]}\n"
        "  k = s32[1,1,3] reshape(k0)\n"
        "  r = s32[8,1,6] convolution(i, k), window={size=3 pad=1_1}, dim_labels=bf0_oi0->bf0",
        0,
    ),
    "convolution, groups": (
        "s32[8,6] {0}",
        "s32[1,8,6]",
        "i = s32[1,8,6] reshape(x)\n  k0 = s32[8,3] slice(y), slice={[0:8],[0:3]}\n"
        "  k = s32[8,1,3] reshape(k0)\n"
        "  r = s32[1,8,6] convolution(i, k), window={size=3 pad=1_1}, dim_labels=bf0_oi0->bf0, "
        "feature_group_count=8",
        1,
    ),
    "convolution, kernels": (
        "s32[8,6] {0}",
        "s32[1,8,3]",
        "k0 = s32[8,3] slice(x), slice={[0:8],[0:3]}\n  k = s32[8,1,3] reshape(k0)\n"
        "  i0 = s32[1,6] slice(y), slice={[0:1],[0:6]}\n  i1 = s32[1,1,6] reshape(i0)\n"
        "  i = s32[1,1,3] slice(i1), slice={[0:1],[0:1],[0:3]}\n"
        "  r = s32[1,8,3] convolution(i, k), window={size=3 pad=1_1}, dim_labels=bf0_oi0->bf0",
        1,
    ),
}


def by_hand(which: str, also: str = "") -> str:
    """``also``: what is read whole, too."""
    given, result, body, dimension = BATCHES[which]
    type, along = given.split(" ")
    sizes = [int(n) for n in type[4:-1].split(",")]
    gathered = int(along[1:-1])
    part = [n // N if d == gathered else n for d, n in enumerate(sizes)]
    other = "s32[6,8]" if sizes == [6, 8] else "s32[8,6]"
    whole = [int(n) for n in result.split("[")[1][:-1].split(",")]
    read = [n // N if d == dimension else n for d, n in enumerate(whole)]
    starts = ", ".join("at" if d == dimension else "zero" for d in range(len(whole)))
    own = f"{result.split('[')[0]}[{','.join(map(str, read))}]"
    cut = f"{own} dynamic-slice(r, {starts}), dynamic_slice_sizes={{{','.join(map(str, read))}}}"
    last = f"ROOT s = {cut}"
    if also:
        last = f"s = {cut}\n  ROOT t = ({own}, {result}) tuple(s, {also})"
    return f"""{HEAD}
ENTRY e {{
  p = s32[{",".join(map(str, part))}] parameter(0)
  y = {other} parameter(1)
  id = u32[] partition-id()
  place = s32[] convert(id)
  zero = s32[] constant(0)
  one = s32[] constant(1)
  size = s32[] constant({read[dimension]})
  at = s32[] multiply(place, size)
  x = {type} all-gather(p), dimensions={{{gathered}}}, {ALL}
  {body}
  {last}
}}
"""


@pytest.mark.quick(
    "reshape",
    "dynamic-slice",
    "gather with batches",
    "scatter with batches",
    "reduce",
    "sort",
    "dot, rows",
    "convolution, groups",
)
@pytest.mark.parametrize("which", BATCHES)
def test_an_op_by_batches_sends_nothing(which: str) -> None:
    written, rewritten = both(by_hand(which))
    assert kinds(written) == ["all-gather"] and kinds(rewritten) == []
    (said,) = rewritten.rewrites
    assert said.name == "x" and "goes" in said.said


# The same along a dimension along which the op is not independent.
OTHERWISE = {
    "sort": "r = s32[8,6] sort(x), dimensions={0}, to_apply=less",
    "slice": "t = s32[9,6] pad(x, one), padding=1_0x0_0\n  r = s32[8,6] slice(t), slice={[0:8],[0:6]}",
    "reverse": "r = s32[8,6] reverse(x), dimensions={0}",
    "reduce-window": "r = s32[8,6] reduce-window(x, zero), window={size=2x1 pad=1_0x0_0}, to_apply=sum",
}


@pytest.mark.parametrize("which", OTHERWISE)
def test_an_op_along_the_dimension_exchanges_parts(which: str) -> None:
    text = by_hand("abs").replace("r = s32[8,6] abs(x)", OTHERWISE[which])
    _, rewritten = both(text)
    assert kinds(rewritten) == ["all-to-all", "all-to-all"]
    # Six columns for four devices: two are filled up.
    assert [c.operands[0].nbytes for c in rewritten.program.collectives] == [2 * 8 * 4] * 2


def test_what_devices_have_for_themselves_is_not_exchanged() -> None:
    """y may differ from device to device."""
    stays(by_hand("abs").replace("abs(x)", "sort(z), dimensions={0}, to_apply=less").replace(
        "  r =", "  z = s32[8,6] add(x, y)\n  r ="
    ))  # fmt: skip


@pytest.mark.parametrize("also", ["x", "r"])
def test_what_is_read_whole_stays_gathered(also: str) -> None:
    """The gathered array itself, or what follows from it: that is gathered instead."""
    written, rewritten = both(by_hand("sort", also))
    assert kinds(written) == kinds(rewritten) == ["all-gather"]
    assert len(rewritten.rewrites) == (also == "r")


def given(*shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def matrices(count: int, size: int) -> np.ndarray:
    """Symmetric and positive definite."""
    a = given(count, size, size)
    return a @ a.swapaxes(1, 2) + size * np.eye(size, dtype="f4")


def triangular(a, b):  # type: ignore[no-untyped-def]
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


X, Y, LAST = P("x"), P(None, "x"), P(None, None, "x")
GONE: dict[str, tuple] = {
    "top_k": (lambda x: lax.top_k(x, 3), [(X, given(8, 12))], X),
    "columns of a solve": (triangular, [(P(), matrices(1, 6)[0]), (Y, given(6, 8))], Y),
    "convolutions of their own": (
        jax.vmap(lambda x, k: jnp.convolve(x, k, mode="same")),
        [(X, given(8, 12)), (X, given(8, 3))],
        X,
    ),
    "cholesky of a part of each": (jnp.linalg.cholesky, [(X, matrices(8, 6))], X),
}


# The BLAS may compute fewer columns otherwise: on processors without AVX-512 a last bit differs.
ROUNDED = {"columns of a solve"}


@pytest.mark.parametrize("which", GONE)
def test_jax_programs_that_need_no_gather(which: str) -> None:
    f, arguments, out = GONE[which]
    module, judged = program(f, arguments, out, exact=which not in ROUNDED)
    assert kinds(module) == []
    largest = max(t.nbytes for t in (*module.program.inputs, *module.program.outputs))
    assert max(t.nbytes for t in module.program.slot_types) <= largest
    judged()


def test_columns_of_a_solve_are_solved_for_alone() -> None:
    """Bit for bit, on any processor, though the BLAS may give others with more columns beside them."""
    f, arguments, out = GONE["columns of a solve"]
    module, _ = program(f, arguments, out)
    (_, matrix), (spec, columns) = arguments
    parts = shards(columns, mesh(4), spec)
    (got,) = Interpreter(module.program).run([matrix] * 4, parts)
    for found, part in zip(got, parts, strict=True):
        same(found, np.asarray(f(matrix, part)), exact=True)


def program(f, arguments, out, over=None, exact=True):  # type: ignore[no-untyped-def]
    """A jitted function, compiled for four devices, and what compares its results."""
    over = over or mesh(4)
    specs = tuple(spec for spec, _ in arguments)
    arrays = [array for _, array in arguments]
    placed = tuple(NamedSharding(over, s) for s in specs)
    function = jax.jit(f, in_shardings=placed, out_shardings=NamedSharding(over, out))
    module = compiled(function, *arrays, num_devices=4)

    def judged() -> None:
        judge_program(module, function, over, specs, *arrays, exact=exact)

    return module, judged


# Matrices of which each device has some rows or columns: what is sent is a part of what XLA sends.
EXCHANGED: dict[str, tuple] = {
    "cholesky": (jnp.linalg.cholesky, [(Y, matrices(8, 8))], Y),
    "eigh": (jnp.linalg.eigh, [(LAST, matrices(8, 8))], Y),
    "lu": (lax.linalg.lu, [(Y, given(8, 8, 8))], Y),
    "qr": (jnp.linalg.qr, [(Y, given(8, 8, 4))], X),
    "svd": (lambda x: jnp.linalg.svd(x, full_matrices=False), [(Y, given(8, 8, 4))], X),
    "triangular_solve": (triangular, [(Y, matrices(8, 8)), (Y, given(8, 8, 3))], Y),
    "top_k": (lambda x: lax.top_k(x, 4), [(Y, given(8, 12))], Y),
    "some columns of each row": (lambda x, u: x.at[:, 2:5].set(u), [(Y, given(8, 16)), (X, given(8, 3))], Y),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), [(Y, given(8, 16))], Y),
    "cummax, from the end": (lambda x: lax.cummax(x, 1, reverse=True), [(Y, given(8, 16))], Y),
    "seven matrices": (jnp.linalg.cholesky, [(Y, matrices(7, 8))], Y),
}  # fmt: skip


@pytest.mark.quick("qr", "top_k", "cumsum")
@pytest.mark.parametrize("which", EXCHANGED)
def test_jax_programs_that_exchange_instead_of_gathering(which: str) -> None:
    f, arguments, out = EXCHANGED[which]
    module, judged = program(f, arguments, out)
    written = module.as_written()
    assert "all-gather" in kinds(written)
    received = [
        sum(t.nbytes for c in m.program.collectives for t in c.results) for m in (written, module)
    ]
    assert received[1] <= 0.75 * received[0]
    # No device has all of the matrices.
    gathered = max(t.nbytes for t in written.program.slot_types)
    assert max(t.nbytes for t in module.program.slot_types) <= gathered / 2
    judged()


def test_results_that_everybody_wants_whole_are_gathered() -> None:
    module, judged = program(lambda x: jnp.sort(x, axis=1), [(X, given(8, 12))], P())
    assert module.rewrites == () and set(kinds(module)) == {"all-gather"}
    judged()


def newton(x: jax.Array) -> jax.Array:
    """As many steps as it takes, of each row its own number."""

    def step(c):  # type: ignore[no-untyped-def]
        return 0.5 * (c + jnp.abs(x[0]) / c)

    return lax.while_loop(
        lambda c: jnp.abs(c * c - jnp.abs(x[0])) > 1e-3, step, 1.0 + jnp.abs(x[0])
    )


MAPPED: dict[str, tuple] = {
    "rows": (lambda x: lax.map(jnp.sort, x), [(X, given(8, 6))], X),
    "rows of two arrays": (
        lambda x, y: lax.map(lambda t: (t[0] @ t[1], jnp.cumsum(t[0])), (x, y)),
        [(X, given(8, 6)), (X, given(8, 6, 3))],
        X,
    ),
    "with what all have": (
        lambda x, y: lax.map(lambda row: row @ y, x),
        [(X, given(8, 6)), (P(), given(6, 3))],
        X,
    ),
    "loops in rows": (lambda x: lax.map(newton, x), [(X, given(8, 6))], X),
    "columns": (lambda x: lax.map(jnp.sort, x.T).T, [(Y, given(6, 8))], Y),
}


@pytest.mark.parametrize("which", MAPPED)
def test_a_map_over_rows_that_are_cut_runs_over_those_of_the_device(which: str) -> None:
    f, arguments, out = MAPPED[which]
    module, judged = program(f, arguments, out)
    assert "all-gather" in kinds(module.as_written()) and kinds(module) == []
    assert all("own part" in r.said for r in module.rewrites)
    judged()


def test_a_scan_that_carries_from_row_to_row_stays_whole() -> None:
    def f(x):  # type: ignore[no-untyped-def]
        return lax.scan(lambda c, row: (c + row.sum(), c + row), jnp.float32(0), x)[1]

    module, judged = program(f, [(X, given(8, 6))], X)
    assert "all-gather" in kinds(module)
    judged()


def root(r: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: jnp.abs(c * c - r) > 1e-3, lambda c: 0.5 * (c + r / c), 1.0 + r)


def roots_of_sums(r: jax.Array) -> jax.Array:
    """A loop within a loop, each with an end of its own for each batch."""
    return lax.while_loop(lambda c: c[0] < 3 * r, lambda c: (c[0] + 1, root(c[1] + r)), (0.0, r))[1]


def until_two(r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random steps: as many as it takes."""

    def step(c):  # type: ignore[no-untyped-def]
        key, x, n = c
        key, drawn = jax.random.split(key)
        return key, x + jax.random.uniform(drawn), n + 1

    return lax.while_loop(lambda c: c[1] < 2.0, step, (jax.random.key(0), r, 0))[1:]


def solved(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b)[0]


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jax.vmap(root)(c + 0.5), c), x, None, length=3)[1].sum(0)


POSITIVE = np.abs(given(8))
ENDS: dict[str, tuple] = {
    "one batch": (jax.vmap(root), [(X, POSITIVE)], X),
    "two": (jax.vmap(jax.vmap(root)), [(X, np.abs(given(8, 6)))], X),
    "loops in loops": (jax.vmap(roots_of_sums), [(X, POSITIVE)], X),
    "in a scan": (scanned, [(X, POSITIVE)], X),
    "random numbers": (jax.vmap(until_two), [(X, POSITIVE)], X),
    "conjugate gradients": (jax.vmap(solved), [(X, matrices(8, 6)), (X, given(8, 6))], X),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", ENDS)
def test_a_loop_over_batches_ends_on_each_device_by_itself(which: str) -> None:
    """Its predicate is reduced in every iteration, as XLA partitions it."""
    f, arguments, out = ENDS[which]
    module, judged = program(f, arguments, out)
    written = kinds(module.as_written())
    assert written and set(written) == {"all-reduce"}
    assert kinds(module) == []
    assert all("when its own part is done" in r.said for r in module.rewrites)
    judged()


def stepped(x: jax.Array, more) -> jax.Array:  # type: ignore[no-untyped-def]
    """All batches go on until none has anything left to do."""
    return lax.while_loop(lambda c: more(c).any(), lambda c: 0.5 * (c + x / c), 1.0 + x)


TOGETHER: dict[str, tuple] = {
    "those that are done go on": (
        lambda x: stepped(x, lambda c: jnp.abs(c * c - x) > 1e-3),
        [(X, POSITIVE)],
        X,
    ),
    "another predicate": (
        lambda x: lax.while_loop(
            lambda c: (c > 1e-3).any(), lambda c: jnp.where(c > 2e-3, 0.5 * c, 0.9 * c), x
        ),
        [(X, POSITIVE)],
        X,
    ),
    "the other side": (
        lambda x: lax.while_loop(
            lambda c: (c > 1e-3).any(), lambda c: jnp.where(c > 1e-3, c * 0.5, c * 0.99), x
        ),
        [(X, POSITIVE)],
        X,
    ),
    "one carry of all": (
        lambda x: lax.while_loop(
            lambda c: (c[0] > 1e-3).any(),
            lambda c: (jnp.where(c[0] > 1e-3, c[0] * 0.5, c[0]), c[1] + 1),
            (x, jnp.zeros(8)),
        )[1],
        [(X, POSITIVE)],
        X,
    ),
}


@pytest.mark.parametrize("which", TOGETHER)
def test_a_loop_in_which_the_others_matter_ends_on_all_at_once(which: str) -> None:
    f, arguments, out = TOGETHER[which]
    module, judged = program(f, arguments, out)
    assert kinds(module) == ["all-reduce"] and module.rewrites == ()
    judged()
