"""Collectives split into parts: what is found, what the parts are, and that results stay.

Modules are run on the executor's devices with XLA's CPU engine, on whole numbers, so that sums are exact, and
compared with NumPy's results.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from split_support import (
    kinds,
    looped,
    names,
    numbers,
    partitioned,
    ran,
    regions,
    split,
    table,
)

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.overlap.apply import OverlapPolicy

GATHERED = """
  x = f32[6,5] parameter(0)
  w = f32[5,7] parameter(1)
  v = f32[5,3] parameter(2)
  g = f32[ROWS,5] all-gather(x), ALL, dimensions={0}
  q = f32[ROWS,7] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[5,ROWS] transpose(g), dimensions={1,0}
  k = f32[3,ROWS] dot(v, t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  o = (f32[ROWS,7], f32[3,ROWS]) tuple(q, k)
  ROOT r = (f32[ROWS,7], f32[3,ROWS]) copy(o)
"""


@pytest.mark.parametrize(("n", "tiles"), [(2, 1), (2, 3), (4, 1), (4, 2)])
def test_a_gather_before_two_products(n: int, tiles: int) -> None:
    module = partitioned(GATHERED.replace("ROWS", str(6 * n)), n)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"g"}, {"q", "t", "k"})
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    # Each device receives the rows of all others, a tile at a time, and nothing is gathered.
    assert kinds(program) == {Kind.PERMUTE: (n - 1) * tiles}
    x, w, v = arguments
    rows = np.concatenate(x)
    for device in range(n):
        np.testing.assert_array_equal(got.results[0][device], rows @ w[device])
        np.testing.assert_array_equal(got.results[1][device], v[device].T @ rows.T)


def test_each_device_begins_with_its_own_rows_and_goes_on_with_its_neighbours() -> None:
    module = split(partitioned(GATHERED.replace("ROWS", "24"), 4), 2)
    pairs = [c.pairs for c in module.lowered().program.collectives]
    steps = [{(source - target) % 4 for source, target in p} for p in pairs]
    assert steps == [{1}, {1}, {2}, {2}, {3}, {3}]
    assert module.lowered().program.collectives[0].name == "g.part3of8"


SCATTERED = """
  x = f32[ROWS,5] parameter(0)
  w = f32[5,7] parameter(1)
  b = f32[7] parameter(2)
  d = f32[ROWS,7] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  c = f32[ROWS,7] broadcast(b), dimensions={1}
  e = f32[ROWS,7] add(d, c)
  ROOT r = f32[6,7] reduce-scatter(e), ALL, dimensions={0}, to_apply=sum
"""


@pytest.mark.parametrize(("n", "tiles"), [(2, 1), (2, 3), (4, 1), (4, 2)])
def test_a_product_before_a_scatter(n: int, tiles: int) -> None:
    module = partitioned(SCATTERED.replace("ROWS", str(6 * n)), n)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"r"}, {"d", "c", "e"})
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.PERMUTE: (n - 1) * tiles}
    x, w, b = arguments
    total = sum(x[d] @ w[d] + b[d] for d in range(n))
    for device in range(n):
        own = total[6 * device : 6 * device + 6]
        np.testing.assert_array_equal(got.results[0][device], own)


@pytest.mark.parametrize(("n", "tiles"), [(2, 3), (4, 2)])
def test_gathers_and_scatters_in_pieces(n: int, tiles: int) -> None:
    """Part t is tile t of the rows of each device; what is read as a whole has its rows in their order."""
    module = partitioned(
        f"""
  x = f32[6,5] parameter(0)
  w = f32[5,7] parameter(1)
  b = f32[{6 * n},7] parameter(2)
  g = f32[{6 * n},5] all-gather(x), ALL, dimensions={{0}}
  q = f32[{6 * n},7] dot(g, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  y = f32[{6 * n},7] add(q, b)
  s = f32[6,7] reduce-scatter(y), ALL, dimensions={{0}}, to_apply=sum
  ROOT r = (f32[6,7], f32[{6 * n},7]) tuple(s, y)
""",
        n,
    )
    chunked = split(module, tiles, pieces=True)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.ALL_GATHER: tiles, Kind.REDUCE_SCATTER: tiles}
    x, w, b = arguments
    products = [np.concatenate(x) @ w[d] + b[d] for d in range(n)]
    for device in range(n):
        rows = slice(6 * device, 6 * device + 6)
        np.testing.assert_array_equal(got.results[0][device], sum(products)[rows])
        np.testing.assert_array_equal(got.results[1][device], products[device])


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("none", ["5", "7", "3"])
def test_arrays_without_elements_around_a_gather(none: str, pieces: bool) -> None:
    """A sum of no products is 0, and a product may have no columns."""
    text = GATHERED.replace("ROWS", "24").replace(f",{none}]", ",0]").replace(f"[{none},", "[0,")
    chunked = split(partitioned(text, 4), 2, pieces)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == ({Kind.ALL_GATHER: 2} if pieces else {Kind.PERMUTE: 6})
    x, w, v = arguments
    rows = np.concatenate(x)
    for device in range(4):
        np.testing.assert_array_equal(got.results[0][device], rows @ w[device])
        np.testing.assert_array_equal(got.results[1][device], v[device].T @ rows.T)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_sum_of_no_products_before_a_scatter(pieces: bool) -> None:
    text = SCATTERED.replace("ROWS", "24").replace(",5]", ",0]").replace("[5,", "[0,")
    chunked = split(partitioned(text, 4), 2, pieces)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == ({Kind.REDUCE_SCATTER: 2} if pieces else {Kind.PERMUTE: 6})
    for array in got.results[0]:
        np.testing.assert_array_equal(array, np.tile(sum(arguments[2]), (6, 1)))


@pytest.mark.parametrize("rows", [True, False])
def test_nothing_of_which_there_is_nothing_is_split(rows: bool) -> None:
    """Neither rows that nobody has, nor results without elements between a product and its scatter."""
    gone = ("[6,", "[0,") if rows else (",7]", ",0]")
    text = SCATTERED.replace("ROWS", "0" if rows else "24").replace(*gone)
    if not rows:
        text = text.replace("f32[7]", "f32[0]")
    assert not regions(partitioned(text, 4))
    if rows:
        assert not regions(partitioned(GATHERED.replace("ROWS", "0").replace("[6,", "[0,"), 4))


def test_regions_have_no_data_in_common() -> None:
    """Two layers that read the same table behind their products are split each by itself."""
    module = partitioned(
        """
  x = f32[4,6] parameter(0)
  w = f32[6,6] parameter(1)
  t = f32[8,6] parameter(2)
  c = f32[8,6] cosine(t)
  g = f32[8,6] all-gather(x), ALL, dimensions={0}
  p = f32[8,6] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  h = f32[8,6] multiply(p, c)
  y = f32[4,6] slice(h), slice={[0:4],[0:6]}
  g2 = f32[8,6] all-gather(y), ALL, dimensions={0}
  p2 = f32[8,6] dot(g2, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT h2 = f32[8,6] multiply(p2, c)
""",
        2,
    )
    assert [names(r) for _, _, r in regions(module)] == [({"g"}, {"p"}), ({"g2"}, {"p2"})]


def test_what_arrives_is_added_in_the_order_of_the_devices() -> None:
    """Of 1e8, 1, -1e8 and 1 the sum from the left is 1 in f32: another order gives 0 or 2."""
    module = partitioned(SCATTERED.replace("ROWS", "24"), 4)
    chunked = split(module, 1)
    x = [np.zeros((24, 5), "f4") for _ in range(4)]
    for array, value in zip(x, (1e8, 1.0, -1e8, 1.0), strict=True):
        array[:, 0] = value
    w = [np.eye(5, 7, dtype="f4")] * 4
    _, got = ran(chunked, [x, w, [np.zeros(7, "f4")] * 4])
    for array in got.results[0]:
        assert array[:, 0].tolist() == [1.0] * 6


@pytest.mark.parametrize("dtype", ["f32", "f64", "s8", "u16", "s64", "c64"])
def test_nothing_is_added_but_what_arrives(dtype: str) -> None:
    """Of every type; and a sum of -0.0 alone keeps its sign."""
    text = SCATTERED.replace("ROWS", "24").replace("add(d, c)", "multiply(d, c)")
    text = text.replace("f32", dtype).replace("to_apply=sum", "to_apply=own")
    own = f"own {{ a = {dtype}[] parameter(0)\n b = {dtype}[] parameter(1)\n"
    more = f"{own} ROOT c = {dtype}[] add(a, b) }}\n"
    chunked = split(partitioned(text, 4, more), 1)
    arguments = numbers(chunked.lowered().program)
    x, w, b = arguments
    if dtype in ("f32", "f64"):
        for row in b:
            row[0] = -0.0
        for array in (*x, *w):
            array[:] = abs(array) + 1
    _, got = ran(chunked, arguments)
    total = sum((x[d] @ w[d] * b[d] for d in range(1, 4)), x[0] @ w[0] * b[0])
    for device, array in enumerate(got.results[0]):
        np.testing.assert_array_equal(array, total[6 * device : 6 * device + 6])
        if dtype in ("f32", "f64"):
            assert np.signbit(array[:, 0]).all()


def test_narrow_floats_are_summed_in_f32() -> None:
    text = SCATTERED.replace("ROWS", "24").replace("f32", "bf16")
    more = (
        "bsum { a = bf16[] parameter(0)\n b = bf16[] parameter(1)\n ROOT c = bf16[] add(a, b) }\n"
    )
    chunked = split(partitioned(text.replace("to_apply=sum", "to_apply=bsum"), 4, more), 1)
    arguments = numbers(chunked.lowered().program)
    for i, array in enumerate(arguments[0]):
        array[:, 0] = (256, 1, 1, 1)[i]  # in bf16 256 + 1 is 256
    arguments[0] = [np.where(np.arange(5) == 0, a, 0).astype(a.dtype) for a in arguments[0]]
    arguments[1] = [np.eye(5, 7).astype(a.dtype) for a in arguments[1]]
    arguments[2] = [np.zeros_like(a) for a in arguments[2]]
    _, got = ran(chunked, arguments)
    assert {float(a[0, 0]) for a in got.results[0]} == {260.0}  # 259, rounded once


LAYER = """
  x = f32[4,6] parameter(0)
  w = f32[6,10] parameter(1)
  v = f32[10,6] parameter(2)
  s = f32[ROWS,10] parameter(3)
  g = f32[ROWS,6] all-gather(x), ALL, dimensions={0}
  h = f32[ROWS,10] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  m = f32[ROWS,10] multiply(h, s)
  e = f32[ROWS,6] dot(m, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  r = f32[4,6] reduce-scatter(e), ALL, dimensions={0}, to_apply=sum
  gw = f32[6,10] dot(g, m), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT o = (f32[4,6], f32[6,10]) tuple(r, gw)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "tiles"), [(2, 2), (4, 1), (4, 4)])
def test_between_a_gather_and_a_scatter_nothing_is_put_together(n: int, tiles: int) -> None:
    """But for the product that sums over the rows, which is not split, and what it reads."""
    module = partitioned(LAYER.replace("ROWS", str(4 * n)), n)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"g", "r"}, {"h", "m", "e"})
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.PERMUTE: 2 * (n - 1) * tiles}
    x, w, v, s = arguments
    rows = np.concatenate(x)
    products = [(rows @ w[d]) * s[d] for d in range(n)]
    total = sum(products[d] @ v[d] for d in range(n))
    for device in range(n):
        np.testing.assert_array_equal(got.results[0][device], total[4 * device : 4 * device + 4])
        np.testing.assert_array_equal(got.results[1][device], rows.T @ products[device])


SEQUENCES = """
  x = f32[2,6,5] parameter(0)
  w = f32[5,7] parameter(1)
  v = f32[7,5] parameter(2)
  s = f32[2,ROWS,7] parameter(3)
  g = f32[2,ROWS,5] all-gather(x), ALL, dimensions={1}
  gm = f32[FLAT,5] reshape(g)
  h = f32[FLAT,7] dot(gm, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  hs = f32[2,ROWS,7] reshape(h)
  m = f32[2,ROWS,7] multiply(hs, s)
  mm = f32[FLAT,7] reshape(m)
  e = f32[FLAT,5] dot(mm, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  es = f32[2,ROWS,5] bitcast(e)
  r = f32[2,6,5] reduce-scatter(es), ALL, dimensions={1}, to_apply=sum
  gw = f32[5,7] dot(gm, mm), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  o = (f32[2,6,5], f32[5,7]) tuple(r, gw)
  ROOT c = (f32[2,6,5], f32[5,7]) copy(o)
"""


@pytest.mark.quick("2-1-False", "4-2-True")
@pytest.mark.parametrize(
    ("n", "tiles", "pieces"),
    [(2, 1, False), (2, 3, False), (4, 2, False), (2, 3, True), (4, 2, True)],
)
def test_rows_of_several_sequences(n: int, tiles: int, pieces: bool) -> None:
    """Products have the rows of all sequences in one dimension, of which each device has several stretches.
    One that sums over the rows reads them put together."""
    text = SEQUENCES.replace("ROWS", str(6 * n)).replace("FLAT", str(12 * n))
    module = partitioned(text, n)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"g", "r"}, {"gm", "h", "hs", "m", "mm", "e", "es"})
    chunked = split(module, tiles, pieces)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert not set(kinds(program)) & ({Kind.PERMUTE} if pieces else {Kind.ALL_GATHER})
    assert len(program.collectives) == (2 * tiles if pieces else 2 * (n - 1) * tiles)
    x, w, v, s = arguments
    rows = np.concatenate(x, axis=1)
    hidden = [(rows @ w[d]) * s[d] for d in range(n)]
    total = sum(hidden[d] @ v[d] for d in range(n))
    for device in range(n):
        own = total[:, 6 * device : 6 * device + 6]
        np.testing.assert_array_equal(got.results[0][device], own)
        want = np.einsum("brk,brf->kf", rows, hidden[device])
        np.testing.assert_array_equal(got.results[1][device], want)


# The places of an expert, from all devices, in one dimension; a device has one expert.
ONE_EXPERT = """
  x = f32[2,4,5] parameter(0)
  w = f32[5,6] parameter(1)
  b = f32[8,6] parameter(2)
  v = f32[6,5] parameter(3)
  a = f32[2,4,5] all-to-all(x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  s = f32[8,5] reshape(a)
  h = f32[8,6] dot(s, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  m = f32[8,6] multiply(h, b)
  e = f32[8,5] dot(m, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  BACK
"""
APART = """u = f32[2,4,5] reshape(e)
  ROOT r = f32[2,4,5] all-to-all(u), channel_id=1, replica_groups={{0,1}}, dimensions={0}"""
TOGETHER = "ROOT r = f32[8,5] all-to-all(e), channel_id=1, replica_groups={{0,1}}, dimensions={0}"


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("back", [APART, TOGETHER])
def test_places_of_one_expert(tiles: int, back: str) -> None:
    """Tokens go to an expert and back, a few places of each device at a time."""
    module = partitioned(ONE_EXPERT.replace("BACK", back), 2)
    ((_, _, region),) = regions(module)
    assert names(region)[0] == {"a", "r"}
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.ALL_TO_ALL: 2 * tiles}
    x, w, b, v = arguments
    made = []
    for owner in range(2):
        tokens = np.concatenate([x[0][owner], x[1][owner]])
        made.append(((tokens @ w[owner]) * b[owner]) @ v[owner])
    for device in range(2):
        want = np.stack([made[owner][4 * device : 4 * device + 4] for owner in range(2)])
        np.testing.assert_array_equal(
            got.results[0][device], want.reshape(got.results[0][device].shape)
        )


def test_an_exchange_of_the_rows_that_are_cut_stays_whole() -> None:
    """Rows that lie behind one another go to one device: a part of them is not a part for each device."""
    module = partitioned(
        """
  x = f32[8,5] parameter(0)
  w = f32[5,6] parameter(1)
  v = f32[6,4] parameter(2)
  d = f32[8,6] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  a = f32[8,6] all-reduce(d), ALL, to_apply=sum
  e = f32[8,4] dot(a, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[8,4] all-to-all(e), channel_id=2, replica_groups={{0,1}}, dimensions={0}
""",
        2,
    )
    ((_, _, region),) = regions(module)
    assert names(region) == ({"a"}, {"d", "e"})
    chunked = split(module, 2)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.ALL_REDUCE: 2, Kind.ALL_TO_ALL: 1}
    x, w, v = arguments
    a = sum(x[d] @ w[d] for d in range(2))
    rows = [np.split(a @ v[d], 2) for d in range(2)]
    for device in range(2):
        want = np.concatenate([rows[source][device] for source in range(2)])
        np.testing.assert_array_equal(got.results[0][device], want)


def test_parts_are_one_segment_on_other_numbers() -> None:
    policy = OverlapPolicy(table(1e6), least_gain=-1.0)
    module = split(partitioned(LAYER.replace("ROWS", "16"), 4), 4)
    program = module.lowered(policy).program
    products = [s for s in program.segments if s.name.startswith(("h.part", "m.part", "e.part"))]
    assert kinds(program)[Kind.PERMUTE] == 24
    assert len(products) <= 3  # the first, which makes room for all, and one for the others


SUMMED = """
  x = f32[8,5] parameter(0)
  w = f32[5,6] parameter(1)
  v = f32[6,4] parameter(2)
  d = f32[8,6] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  a = f32[8,6] all-reduce(d), ALL, to_apply=sum
  m = f32[8,6] multiply(a, a)
  e = f32[8,4] dot(m, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT b = f32[8,4] all-reduce(e), ALL, to_apply=sum
"""


@pytest.mark.parametrize("tiles", [2, 4])
def test_sums_in_parts(tiles: int) -> None:
    module = partitioned(SUMMED, 2)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"a", "b"}, {"d", "m", "e"})
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.ALL_REDUCE: 2 * tiles}
    x, w, v = arguments
    a = sum(x[d] @ w[d] for d in range(2))
    want = sum((a * a) @ v[d] for d in range(2))
    for array in got.results[0]:
        np.testing.assert_array_equal(array, want)


def test_numbers_of_parts_are_made_once_for_all_regions() -> None:
    """Two regions with sums: the parts of both begin at rows 0, 2, 4 and 6."""
    text = SUMMED.replace("ROOT ", "")
    again = re.sub(r"\b([dameb])\b(?=[ ,)])", r"\1.2", text[text.index("  d =") :])
    both = f"{text}{again}  ROOT r = (f32[8,4], f32[8,4]) tuple(b, b.2)\n"
    module = partitioned(both, 2)
    assert len(regions(module)) == 2
    program = split(module, 4).lowered().program
    numbers = [t for s in program.segments for t in s.outputs if t.dtype == "s32"]
    assert len(numbers) == 4
    assert kinds(program) == {Kind.ALL_REDUCE: 16}


EXPERTS = """
  x = f32[2,4,3,5] parameter(0)
  w = f32[4,5,6] parameter(1)
  v = f32[4,6,5] parameter(2)
  a = f32[2,4,3,5] all-to-all(x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  t = f32[4,2,3,5] transpose(a), dimensions={1,0,2,3}
  s = f32[4,6,5] reshape(t)
  h = f32[4,6,6] dot(s, w), BATCHED
  m = f32[4,6,6] multiply(h, h)
  e = f32[4,6,5] dot(m, v), BATCHED
  u = f32[4,2,3,5] reshape(e)
  y = f32[2,4,3,5] transpose(u), dimensions={1,0,2,3}
  ROOT b = f32[2,4,3,5] all-to-all(y), channel_id=1, replica_groups={{0,1}}, dimensions={0}
""".replace(
    "BATCHED",
    "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
)


@pytest.mark.parametrize("tiles", [2, 4])
def test_experts_between_two_exchanges(tiles: int) -> None:
    """Tokens go to the devices of their experts and back, a few experts at a time."""
    module = partitioned(EXPERTS, 2)
    ((_, _, region),) = regions(module)
    assert names(region)[0] == {"a", "b"}
    chunked = split(module, tiles)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.ALL_TO_ALL: 2 * tiles}
    x, w, v = arguments
    for device in range(2):
        for owner in range(2):
            h = np.einsum("eci,eif->ecf", x[device][owner], w[owner])
            want = np.einsum("ecf,efo->eco", h * h, v[owner])
            np.testing.assert_array_equal(got.results[0][device][owner], want)


def test_in_a_loop() -> None:
    module = looped(3)
    ((block, _, _),) = regions(module)
    assert block > 0
    chunked = split(module, 2)
    arguments = [[a % 2 for a in row] for row in numbers(chunked.lowered().program)]
    _, got = ran(chunked, arguments)
    x, w, v = arguments
    for _ in range(3):
        rows = np.concatenate(x)
        total = sum(rows @ w[d] @ v[d] for d in range(2))
        x = [total[:4], total[4:]]
    for device in range(2):
        np.testing.assert_array_equal(got.results[0][device], x[device])


ALONG_ANOTHER = {
    "all-gather": """
  x = f32[6,5] parameter(0)
  w = f32[ROWS,7] parameter(1)
  g = f32[6,ROWS] all-gather(x), ALL, dimensions={1}
  ROOT d = f32[6,7] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
""",
    "reduce-scatter": """
  x = f32[6,5] parameter(0)
  w = f32[5,ROWS] parameter(1)
  d = f32[6,ROWS] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  b = f32[6,ROWS] reverse(d), dimensions={1}
  ROOT r = f32[6,5] reduce-scatter(b), ALL, dimensions={1}, to_apply=sum
""",
}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ALONG_ANOTHER)
def test_gathers_and_scatters_along_another_dimension(kind: str, n: int) -> None:
    """Where the gathered dimension is contracted, or what is scattered is coupled before, other rows are cut:
    each part is gathered or scattered by itself."""
    chunked = split(partitioned(ALONG_ANOTHER[kind].replace("ROWS", str(5 * n)), n), 3)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind(kind): 3}
    x, w = arguments
    total = sum((x[d] @ w[d])[:, ::-1] for d in range(n)) if kind == "reduce-scatter" else None
    for device in range(n):
        expected = (
            np.concatenate(x, 1) @ w[device]
            if total is None
            else total[:, 5 * device : 5 * device + 5]
        )
        np.testing.assert_array_equal(got.results[0][device], expected)


def test_a_convolution_and_what_pools_it() -> None:
    window = "window={size=1x2x1 stride=1x2x1}"
    more = (
        "max { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] maximum(a, b) }\n"
    )
    module = partitioned(
        f"""
  x = f32[2,6,3] parameter(0)
  k = f32[3,3,5] parameter(1)
  low = f32[] constant(-1000)
  g = f32[4,6,3] all-gather(x), ALL, dimensions={{0}}
  c = f32[4,4,5] convolution(g, k), window={{size=3}}, dim_labels=b0f_0io->b0f
  ROOT p = f32[4,2,5] reduce-window(c, low), {window}, to_apply=max
""",
        2,
        more,
    )
    chunked = split(module, 2)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.PERMUTE: 2}
    x, k = arguments
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(x), 3, 1)
    for device in range(2):
        made = np.einsum("bwiv,vio->bwo", windows, k[device])
        np.testing.assert_array_equal(got.results[0][device], made.reshape(4, 2, 2, 5).max(axis=2))


LESS = """
less { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT }
"""

BY_ROWS = {
    "features are sorted": (
        "o = f32[ROWS,5] sort(g), dimensions={1}, to_apply=less",
        lambda g: np.sort(g, axis=1),
    ),
    "features are looked up": (
        """
  i = s32[5,1] constant({{3},{0},{4},{4},{1}})
  o = f32[ROWS,5] gather(g, i), offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, """
        "index_vector_dim=1, slice_sizes={ROWS,1}",
        lambda g: g[:, [3, 0, 4, 4, 1]],
    ),
    "one feature of each row is looked up": (
        """
  i = s32[ROWS,1,1] parameter(2)
  p = f32[ROWS,1] gather(g, i), offset_dims={}, collapsed_slice_dims={1}, start_index_map={1}, """
        "operand_batching_dims={0}, start_indices_batching_dims={0}, index_vector_dim=2, "
        """slice_sizes={1,1}
  f = f32[ROWS] reshape(p)
  b = f32[ROWS,5] broadcast(f), dimensions={0}
  o = f32[ROWS,5] add(g, b)""",
        lambda g, i: g + np.take_along_axis(g, i[:, :, 0].clip(0, 4), axis=1),
    ),
    "rows are added to some features": (
        """
  i = s32[2,1] constant({{3},{0}})
  t = f32[ROWS,2] slice(g), slice={[0:ROWS],[1:3]}
  o = f32[ROWS,5] scatter(g, i, t), update_window_dims={0}, inserted_window_dims={1}, """
        "scatter_dims_to_operand_dims={1}, index_vector_dim=1, to_apply=sum",
        lambda g: g + np.stack([g[:, 2], 0 * g[:, 0], 0 * g[:, 0], g[:, 1], 0 * g[:, 0]], 1),
    ),
}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("between", BY_ROWS)
def test_rows_are_sorted_and_looked_up_in(between: str, pieces: bool) -> None:
    """What works on each row by itself is computed part after part between a gather and a product."""
    text, expected = BY_ROWS[between]
    module = partitioned(
        f"""
  x = f32[6,5] parameter(0)
  w = f32[5,7] parameter(1)
  g = f32[12,5] all-gather(x), ALL, dimensions={{0}}
  {text.replace("ROWS", "12")}
  ROOT d = f32[12,7] dot(o, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
""",
        2,
        LESS,
    )
    ((_, _, region),) = regions(module)
    assert set(re.findall(r"(\w) = f32\[ROWS", text)) <= names(region)[1]
    chunked = split(module, 3, pieces)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == ({Kind.ALL_GATHER: 3} if pieces else {Kind.PERMUTE: 3})
    x, w, *more = arguments
    for device in range(2):
        rows = expected(np.concatenate(x), *(a[device] for a in more))
        np.testing.assert_array_equal(got.results[0][device], rows @ w[device])


def test_groups_of_features_are_not_cut() -> None:
    """Channels that are gathered before a convolution of two groups: a part has whole groups."""
    module = partitioned(
        """
  x = f32[2,6,6] parameter(0)
  k = f32[3,6,12] parameter(1)
  g = f32[2,6,12] all-gather(x), ALL, dimensions={2}
  ROOT c = f32[2,4,12] convolution(g, k), window={size=3}, dim_labels=b0f_0io->b0f,
    feature_group_count=2
""",
        2,
    )
    ((_, _, region),) = regions(module)
    assert [parts for parts in (2, 4, 6, 12) if region.divides(parts)] == [2]
    chunked = split(module, 1)
    arguments = numbers(chunked.lowered().program)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.PERMUTE: 1}
    x, k = arguments
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(x, 2), 3, 1)
    for device in range(2):
        made = [
            np.einsum("bwiv,vio->bwo", windows[:, :, own], k[device][:, :, own])
            for own in (slice(0, 6), slice(6, 12))
        ]
        np.testing.assert_array_equal(got.results[0][device], np.concatenate(made, 2))


UNFIT = {
    "all that is gathered is contracted": """
  x = f32[5,6] parameter(0)
  w = f32[10,6,7] parameter(1)
  g = f32[10,6] all-gather(x), ALL, dimensions={0}
  ROOT d = f32[7] dot(g, w), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}
""",
    "no product reads it": """
  x = f32[5,6] parameter(0)
  g = f32[10,6] all-gather(x), ALL, dimensions={0}
  ROOT d = f32[10,6] tanh(g)
""",
    "rows are coupled before the product": """
  x = f32[5,6] parameter(0)
  w = f32[6,7] parameter(1)
  g = f32[10,6] all-gather(x), ALL, dimensions={0}
  s = f32[10,6] sort(g), dimensions={0}, to_apply=less
  ROOT d = f32[10,7] dot(s, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
""",
    "a token orders it": """
  x = f32[5,6] parameter(0)
  w = f32[6,7] parameter(1)
  y = f32[5,6] all-reduce(x), ALL, to_apply=sum
  g = f32[10,6] all-gather(x), ALL, dimensions={0}, control-predecessors={y}
  d = f32[10,7] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT o = (f32[10,7], f32[5,6]) tuple(d, y)
""",
}


@pytest.mark.parametrize("why", UNFIT)
def test_what_is_left_alone(why: str) -> None:
    assert not regions(partitioned(UNFIT[why], 2, LESS))


def test_not_every_device_in_a_group() -> None:
    text = GATHERED.replace("ROWS", "12").replace("ALL", "PAIRS")
    assert regions(partitioned(text, 4))
    half = text.replace("PAIRS", "channel_id=1, use_global_device_ids=true, replica_groups={{0,1}}")
    assert not regions(partitioned(half, 4))
