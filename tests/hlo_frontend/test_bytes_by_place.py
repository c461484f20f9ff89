"""Rows that each device looks up, or writes, among its own: nothing is sent, and no device has all of them.

XLA's partitioner gathers the row numbers, and reduces or writes what every device found for all rows.
Programs of JAX are compared with its CPU backend bit for bit, zeros with their signs. Modules by hand show
where nothing may be left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, kinds, mesh, shards
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding
from random_rows import compare
from test_bytes import ALL, both, stays

B, K = 16, 12
X, Y = P("x"), P(None, "x")


def given(*shape: int, dtype: str = "f4") -> np.ndarray:
    """With zeros of both signs among the numbers."""
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    array[::3, ::2] = 0
    array[::2, ::3] *= -1
    return array


def zeros(*shape: int) -> np.ndarray:
    """Of both signs."""
    return np.where(np.random.default_rng(3).random(shape) < 0.5, 0.0, -0.0).astype("f4")


def numbers(*shape: int, below: int = K) -> np.ndarray:
    return np.random.default_rng(1).integers(0, below, shape).astype("i4")


def wild(*shape: int) -> np.ndarray:
    """Some are no columns."""
    return np.random.default_rng(2).integers(-3 * K, 3 * K, shape).astype("i4")


def program(f, arguments, out, over):  # type: ignore[no-untyped-def]
    """A jitted function, compiled for the devices of a mesh, and what compares its results bit for bit."""
    specs = [spec for spec, _ in arguments]
    arrays = [array for _, array in arguments]
    placed = tuple(NamedSharding(over, s) for s in specs)
    results = jax.tree.map(lambda spec: NamedSharding(over, spec), out)
    function = jax.jit(f, in_shardings=placed, out_shardings=results)
    module = compiled(function, *arrays, num_devices=over.devices.size)

    def judged() -> None:
        own = [shards(a, over, s) for a, s in zip(arrays, specs, strict=True)]
        got = Interpreter(module.program).run(*own)
        wanted = function(*(jax.device_put(a, p) for a, p in zip(arrays, placed, strict=True)))
        for result, reference in zip(got, jax.tree.leaves(wanted), strict=True):
            by_device = {s.device: np.asarray(s.data) for s in reference.addressable_shards}
            for d, device in enumerate(over.devices.flat):
                assert result[d].dtype == by_device[device].dtype
                assert result[d].tobytes() == by_device[device].tobytes()

    return module, judged


def silent(f, arguments, out=X, over=None):  # type: ignore[no-untyped-def]
    """It sends nothing, a device has no more than its parts of arguments and results, and bits are equal."""
    module, judged = program(f, arguments, out, over or mesh(8))
    assert kinds(module.as_written()) and kinds(module) == []
    types = (*module.program.inputs, *module.program.outputs)
    assert max(t.size for t in module.program.slot_types) <= max(t.size for t in types)
    judged()


def rows() -> jax.Array:
    return jnp.arange(B)


# Rows by row number: as XLA partitions them, all of them are gathered, reduced, or both.
BY_NUMBER: dict[str, tuple] = {
    "get": (lambda x, i: x[rows(), i], [(X, given(B, K)), (X, numbers(B))]),
    "get, several of each": (
        lambda x, i: x[rows()[:, None], i],
        [(X, given(B, K)), (X, numbers(B, 3))],
    ),
    "get rows of more": (lambda x, i: x[rows(), i], [(X, given(B, K, 3)), (X, numbers(B))]),
    "get, any dimension": (lambda x, i: x[rows(), :, i], [(X, given(B, 3, K)), (X, numbers(B))]),
    "get, bytes as numbers": (
        lambda x, i: x[rows(), i.astype("uint8")],
        [(X, given(B, K)), (X, numbers(B))],
    ),
    "get, filled in": (
        lambda x, i: x.at[rows(), i].get(mode="fill"),
        [(X, given(B, K)), (X, wild(B))],
    ),
    "get, clipped": (
        lambda x, i: x.at[rows(), i].get(mode="clip"),
        [(X, given(B, K)), (X, wild(B))],
    ),
    "get halves": (
        lambda x, i: x.astype("bfloat16")[rows(), i],
        [(X, given(B, K)), (X, numbers(B))],
    ),
    "get predicates": (lambda x, i: (x > 0)[rows(), i], [(X, given(B, K)), (X, numbers(B))]),
    "get integers": (lambda x, i: x[rows(), i], [(X, numbers(B, K)), (X, numbers(B))]),
    "get complex numbers": (
        lambda x, i: x[rows(), i],
        [(X, given(B, K, dtype="c8")), (X, numbers(B))],
    ),
    "get of two arrays": (
        lambda x, y, i: (x[rows(), i], y[rows(), i]),
        [(X, given(B, K)), (X, given(B, K, 3)), (X, numbers(B))],
    ),
    "gradient of get": (
        jax.grad(lambda x, i: jnp.sin(x[rows(), i]).sum()),
        [(X, given(B, K)), (X, numbers(B))],
    ),
    "a loss of labels": (
        jax.grad(lambda x, i: -jax.nn.log_softmax(x)[rows(), i].sum()),
        [(X, given(B, K)), (X, numbers(B))],
    ),
    "set": (
        lambda x, i, u: x.at[rows(), i].set(u),
        [(X, given(B, K)), (X, numbers(B)), (X, given(B, 1)[:, 0])],
    ),
    "set a constant": (lambda x, i: x.at[rows(), i].set(1.0), [(X, given(B, K)), (X, numbers(B))]),
    "set, some left out": (
        lambda x, i, u: x.at[rows(), i].set(u, mode="drop"),
        [(X, given(B, K)), (X, wild(B)), (X, given(B, 1)[:, 0])],
    ),
    "add, the same again": (
        lambda x, i, u: x.at[rows()[:, None], i].add(u),
        [(X, given(B, K)), (X, numbers(B, 5, below=2)), (X, given(B, 5))],
    ),
    "multiply": (
        lambda x, i, u: x.at[rows()[:, None], i].mul(u),
        [(X, given(B, K)), (X, numbers(B, 5)), (X, given(B, 5))],
    ),
    "maximum": (
        lambda x, i, u: x.at[rows(), i].max(u),
        [(X, given(B, K)), (X, numbers(B)), (X, given(B, 1)[:, 0])],
    ),
    "product": (
        lambda x, i, u: x.at[rows(), i].mul(u),
        [(X, given(B, K)), (X, numbers(B)), (X, given(B, 1)[:, 0])],
    ),
    "minimum of zeros": (
        lambda x, i, u: x.at[rows(), i].min(u),
        [(X, zeros(B, K)), (X, numbers(B)), (X, zeros(B, 2)[:, 1])],
    ),
    "maximum of zeros": (
        lambda x, i, u: x.at[rows(), i].max(u),
        [(X, zeros(B, K)), (X, numbers(B)), (X, zeros(B, 2)[:, 1])],
    ),
    "gradient of a determinant": (
        jax.grad(lambda a: jnp.linalg.det(a).sum()),
        [(X, given(B, 4, 4))],
    ),
}  # fmt: skip


@pytest.mark.quick(
    "get",
    "get, clipped",
    "gradient of get",
    "set, some left out",
    "add, the same again",
    "minimum of zeros",
)
@pytest.mark.parametrize("which", BY_NUMBER)
def test_rows_by_number_among_a_devices_own(which: str) -> None:
    f, arguments = BY_NUMBER[which]
    silent(f, arguments)


def test_rows_by_number_over_both_axes_of_a_mesh() -> None:
    f, arguments = BY_NUMBER["gradient of get"]
    both = P(("x", "y"))
    silent(f, [(both, a) for _, a in arguments], both, over=mesh(2, 4))


# jax #23052: rows of an array whose rows are spread, set by constant numbers.
u = given(3, 6)
SET: dict[str, tuple] = {
    "a few": (lambda x, u: x.at[0:3].set(u), [(X, given(B, 6)), (P(), u)]),
    "across the middle": (lambda x, u: x.at[5:8].set(u), [(X, given(B, 6)), (P(), u)]),
    "nearly all": (lambda x, u: x.at[1:].set(u), [(X, given(B, 6)), (P(), given(B - 1, 6))]),
    "one after the other": (
        lambda x, u: x.at[0:3].set(u).at[2:5].set(u + 1),
        [(X, given(B, 6)), (P(), u)],
    ),
    "some columns of them": (
        lambda x, u: x.at[3:6, 1:5].set(u[:, 1:5]),
        [(X, given(B, 6)), (P(), u)],
    ),
    "added": (lambda x, u: x.at[5:8].add(u), [(X, given(B, 6)), (P(), u)]),
    "multiplied, some columns": (
        lambda x, u: x.at[5:8, 2:5].multiply(u[:, 1:4]),
        [(X, given(B, 6)), (P(), u)],
    ),
    "sorted before and behind": (
        lambda x, u: jnp.sort(jnp.sort(x, 1).at[4:7].set(u), 1),
        [(X, given(B, 6)), (P(), u)],
    ),
    "from where an argument says": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], i[1])),
        [(X, given(B, 7)), (P(), u), (P(), np.array([12, 5], "i4"))],
    ),
}


@pytest.mark.parametrize("which", SET)
def test_rows_set_by_constant_numbers(which: str) -> None:
    f, arguments = SET[which]
    silent(f, arguments)


# Rows of other devices are asked for, or written: then something must be sent.
SPREAD: dict[str, tuple] = {
    "the next row": (lambda x, i: x[(rows() + 1) % B, i], [(X, given(B, K)), (X, numbers(B))]),
    "rows() from the end": (lambda x, i: x[B - 1 - rows(), i], [(X, given(B, K)), (X, numbers(B))]),
    "any row": (lambda x, i: x[i, rows() % K], [(X, given(B, K)), (X, numbers(B))]),
    "rows added to others": (
        lambda x, i: x.at[5:8].add(x[4:7] + i[0]),
        [(X, given(B, K)), (X, numbers(B))],
    ),
    "the next row, set": (
        lambda x, i: x.at[(rows() + 1) % B, i].set(1.0),
        [(X, given(B, K)), (X, numbers(B))],
    ),
}


@pytest.mark.quick("any row", "the next row, set")
@pytest.mark.parametrize("which", SPREAD)
def test_rows_of_other_devices_are_sent(which: str) -> None:
    module, judged = program(*SPREAD[which], X, mesh(8))
    assert kinds(module)
    judged()


def by_hand(body: str) -> str:
    """A module for four devices, of which each has two of eight rows."""
    return f"""HloModule m, num_partitions=4

sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
product {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] multiply(a, b)
}}
ENTRY e {{
  x = f32[2,3] parameter(0)
  j = s32[2,1] parameter(1)
  id = u32[] partition-id()
  place = s32[] convert(id)
  zero = s32[] constant(0)
  two = s32[] constant(2)
  own = s32[] multiply(place, two)
  none = f32[] constant(0)
  nothing = f32[8,3] broadcast(none), dimensions={{}}
  first = s32[2,1] iota(), iota_dimension=0
  offset = s32[2,1] broadcast(own), dimensions={{}}
{body}
}}
"""


WRITE = """  u = f32[2,1,3] reshape(x)
  r = f32[8,3] scatter({into}, {rows}, u), update_window_dims={{1,2}}, inserted_window_dims={{}},
    scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=sum
"""
SUM = "  ROOT s = f32[8,3] all-reduce(r), to_apply=sum, " + ALL
OWN = "  rows = s32[2,1] add(first, offset)\n"
# What a device writes, all in the rows of its own part: the sum is made of those parts.
GIVEN = {
    "rows by number": OWN + WRITE.format(into="nothing", rows="rows"),
    "an update": "  r = f32[8,3] dynamic-update-slice(nothing, x, own, zero)\n",
    "a choice": """  i = s32[8] iota(), iota_dimension=0
  low = s32[8] broadcast(own), dimensions={}
  after = s32[] add(own, two)
  high = s32[8] broadcast(after), dimensions={}
  a = pred[8] compare(i, low), direction=GE
  b = pred[8] compare(i, high), direction=LT
  c = pred[8] and(a, b)
  mine = pred[8,3] broadcast(c), dimensions={0}
  many = f32[8,3] concatenate(x, x, x, x), dimensions={0}
  r = f32[8,3] select(mine, many, nothing)
""",
}


@pytest.mark.parametrize("which", GIVEN)
def test_a_sum_of_own_parts_is_gathered(which: str) -> None:
    written, rewritten = both(by_hand(GIVEN[which] + SUM))
    assert kinds(written) == ["all-reduce"] and kinds(rewritten) == ["all-gather"]
    (said,) = rewritten.rewrites
    assert said.name == "s" and "own part only" in said.said


# One change each: something that another device might need as well.
NOT_GIVEN = {
    "rows of others": GIVEN["rows by number"].replace("add(first, offset)", "add(first, j)"),
    "a row too far": GIVEN["rows by number"].replace("add(first, offset)", "add(first, next)").replace(
        "  rows =", "  one = s32[] constant(1)\n  o = s32[] add(own, one)\n"
        "  next = s32[2,1] broadcast(o), dimensions={}\n  rows ="
    ),
    "into ones": GIVEN["rows by number"].replace("scatter(nothing", "scatter(ones").replace(
        "  u =", "  one = f32[] constant(1)\n  ones = f32[8,3] broadcast(one), dimensions={}\n  u ="
    ),
    "into negative zeros": GIVEN["rows by number"].replace("scatter(nothing", "scatter(minus").replace(
        "  u =", "  m = f32[] constant(-0.0)\n  minus = f32[8,3] broadcast(m), dimensions={}\n  u ="
    ),
    "an update that begins before": GIVEN["an update"].replace("own, zero)", "before, zero)").replace(
        "  r =", "  one = s32[] constant(1)\n  before = s32[] subtract(own, one)\n  r ="
    ),
    "a choice of one row more": GIVEN["a choice"].replace("direction=LT", "direction=LE"),
}  # fmt: skip


@pytest.mark.parametrize("which", NOT_GIVEN)
def test_a_sum_of_more_than_own_parts_is_a_sum(which: str) -> None:
    stays(by_hand(NOT_GIVEN[which] + SUM))


def test_a_product_of_own_parts_is_a_product() -> None:
    stays(by_hand(GIVEN["rows by number"] + SUM.replace("to_apply=sum", "to_apply=product")))


GATHERED = f"""  v = f32[8,3] all-gather(x), dimensions={{0}}, {ALL}
  rows = s32[2,1] add(first, offset)
  k = s32[8,1] all-gather({{rows}}), dimensions={{0}}, {ALL}
  l = s32[8,1] broadcast(own), dimensions={{}}
  m = s32[8,1] subtract(k, l)
  w = f32[8,1,3] reshape(v)
  ROOT s = f32[2,3] scatter(x, m, w), update_window_dims={{1,2}}, inserted_window_dims={{}},
    scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=sum
"""


def test_a_scatter_into_own_rows_needs_only_those() -> None:
    written, rewritten = both(by_hand(GATHERED.replace("{rows}", "rows")))
    assert kinds(written) == ["all-gather"] * 2 and kinds(rewritten) == []


def test_a_scatter_of_rows_that_may_be_anywhere_needs_all() -> None:
    stays(by_hand(GATHERED.replace("{rows}", "j")))


PICKED = f"""  v = f32[8,3] all-gather(x), dimensions={{0}}, {ALL}
  rows = s32[2,1] add(first, offset)
  k = s32[8,1] all-gather({{rows}}), dimensions={{0}}, {ALL}
  r = f32[8,3] gather(v, k), offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=1, slice_sizes={{1,3}}
  ROOT s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
"""
WRITTEN = f"""  v = f32[8,3] all-gather(x), dimensions={{0}}, {ALL}
  rows = s32[2,1] add(first, offset)
  k = s32[8,1] all-gather({{rows}}), dimensions={{0}}, {ALL}
  w = f32[8,1,3] reshape(v)
  r = f32[8,3] scatter(v, k, w), update_window_dims={{1,2}}, inserted_window_dims={{}},
    scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=sum
  ROOT s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
"""


@pytest.mark.parametrize("body", [PICKED, WRITTEN])
def test_rows_by_number_of_a_gathered_array(body: str) -> None:
    """If each device's numbers are those of its own rows; else something is sent, and bits are the same."""
    _, rewritten = both(by_hand(body.replace("{rows}", "rows")))
    assert kinds(rewritten) == []
    _, rewritten = both(by_hand(body.replace("{rows}", "j")))
    assert kinds(rewritten)


UPDATED = f"""  v = f32[8,3] all-gather(x), dimensions={{0}}, {ALL}
  o = f32[3,3] slice(v), slice={{[2:5],[0:3]}}
  n = f32[3,3] multiply(o, o)
  r = f32[8,3] dynamic-update-slice(v, n, two, zero)
  ROOT s = f32[2,3] dynamic-slice(r, own, zero), dynamic_slice_sizes={{2,3}}
"""


def test_an_update_made_of_the_rows_that_it_replaces() -> None:
    _, rewritten = both(by_hand(UPDATED))
    assert kinds(rewritten) == []


@pytest.mark.parametrize(
    ("of", "instead"),
    [
        ("[2:5]", "[1:4]"),
        ("multiply(o, o)", "reverse(o), dimensions={0}"),
        ("ROOT s = ", "s = "),
    ],
)
def test_an_update_made_of_other_rows_or_read_elsewhere(of: str, instead: str) -> None:
    body = UPDATED.replace(of, instead)
    if "ROOT" not in body:
        body += "  ROOT t = (f32[2,3], f32[3,3]) tuple(s, o)\n"
    _, rewritten = both(by_hand(body))
    assert kinds(rewritten)


def test_rows_that_all_devices_write_into_a_gathered_array() -> None:
    """Each writes those of its own rows among them."""
    given = WRITTEN.replace("{rows}), dimensions={0}, " + ALL, "n)").replace(
        "all-gather(n", "copy(n"
    )
    given = given.replace("k = s32[8,1]", "k = s32[3,1]")
    given = given.replace("w = f32[8,1,3] reshape(v)", "w = f32[3,1,3] broadcast(m), dimensions={}")
    given = given.replace("  w =", "  m = f32[] constant(30)\n  w =")
    for numbers_ in ("{{1},{6},{1}}", "{{7},{-1},{8}}"):
        _, rewritten = both(by_hand(f"  n = s32[3,1] constant({numbers_})\n" + given))
        assert kinds(rewritten) == []


@pytest.mark.thorough
def test_random_programs_have_the_bits_of_what_is_written() -> None:
    found = [compare(seed) for seed in range(12)]
    assert [said for outcome, said in found if outcome == "differs"] == []
    assert len({outcome for outcome, _ in found}) == 3
