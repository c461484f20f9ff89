"""Ragged exchanges split into parts: each moves the rows that lie in a stretch of the buffer.

As `test_split`: run on the executor's devices with XLA's CPU engine, on whole numbers, against NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
from split_support import kinds, names, numbers, partitioned, ran, regions, split

from stretto.collectives.ops import Kind

RAGGED = """
  x = f32[7,5] parameter(0)
  w = f32[5,6] parameter(1)
  filled = f32[16,5] parameter(2)
  y = f32[7,6] parameter(3)
  starts = s32[8] parameter(4)
  sizes = s32[8] parameter(5)
  places = s32[8] parameter(6)
  arriving = s32[8] parameter(7)
  home = s32[8] parameter(8)
  landed = s32[8] parameter(9)
  there = f32[16,5] ragged-all-to-all(x, filled, starts, sizes, places, arriving), EVERYONE
  d = f32[16,6] dot(there, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  back = f32[7,6] ragged-all-to-all(d, y, landed, arriving, home, sizes), EVERYONE
  ROOT r = (f32[7,6], f32[16,5]) tuple(back, there)
""".replace("EVERYONE", "channel_id=1, replica_groups={{0,1,2,3}}")


def routed(sizes: np.ndarray) -> list[np.ndarray]:
    """Numbers of rows by source, target and update, and where these begin: at the source, with a gap of one
    row at the end of each buffer; at the target, where rows of an update lie together."""
    flat = sizes.reshape(len(sizes), -1)
    starts = (np.cumsum(flat, 1) - flat).reshape(sizes.shape)
    by_target = sizes.transpose(1, 2, 0).reshape(len(sizes), -1)
    places = 1 + np.cumsum(by_target, 1) - by_target
    places = places.reshape(len(sizes), 2, -1).transpose(2, 0, 1)
    return [starts, sizes, places]


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize(("seed", "of"), [(0, "s32"), (1, "s64"), (2, "s32")])
def test_ragged_rows_of_each_part_of_a_buffer(tiles: int, seed: int, of: str) -> None:
    """Rows of one pair of devices may be those of several parts; what nobody writes to keeps its content."""
    module = partitioned(RAGGED.replace("s32[", f"{of}["), 4)
    ((_, _, region),) = regions(module)
    assert names(region) == ({"there", "back"}, {"d"})
    chunked = split(module, tiles)
    rng = np.random.default_rng(seed)
    arguments = numbers(chunked.lowered().program, seed)
    sizes = rng.multinomial(6, np.full(8, 1 / 8), size=4).reshape(4, 4, 2)
    sizes[:, 1:3] //= 2
    if seed == 2:
        sizes[:, [0, 2]] = 0  # two devices receive no rows, one sends none
        sizes[3] = 0
    starts, sizes, places = routed(sizes)
    for d in range(4):
        for k, own in enumerate(
            (starts[d], sizes[d], places[d], sizes[:, d], starts[:, d], places[:, d])
        ):
            arguments[4 + k][d] = own.reshape(-1).astype(arguments[4][0].dtype)
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.RAGGED_ALL_TO_ALL: 2 * tiles, Kind.ALL_TO_ALL: 2}
    x, w, filled, y = arguments[:4]
    there = [a.copy() for a in filled]
    back = [a.copy() for a in y]
    rows = [
        (s, t, *(a[s, t, u] for a in (starts, places, sizes)))
        for s in range(4)
        for t in range(4)
        for u in range(2)
    ]
    for s, t, start, place, n in rows:
        there[t][place : place + n] = x[s][start : start + n]
    for s, t, start, place, n in rows:
        back[s][start : start + n] = (there[t] @ w[t])[place : place + n]
    for d in range(4):
        np.testing.assert_array_equal(got.results[0][d], back[d])
        np.testing.assert_array_equal(got.results[1][d], there[d])


def test_columns_of_ragged_rows() -> None:
    """Where products sum over rows, each part is some columns of all of them."""
    module = partitioned(
        """
  x = f32[7,8] parameter(0)
  w = f32[16,6] parameter(1)
  filled = f32[16,8] parameter(2)
  starts = s32[8] parameter(3)
  sizes = s32[8] parameter(4)
  places = s32[8] parameter(5)
  arriving = s32[8] parameter(6)
  there = f32[16,8] ragged-all-to-all(x, filled, starts, sizes, places, arriving), channel_id=1,
    replica_groups={{0,1,2,3}}
  ROOT d = f32[6,8] dot(w, there), lhs_contracting_dims={0}, rhs_contracting_dims={0}
""",
        4,
    )
    ((_, _, region),) = regions(module)
    assert names(region) == ({"there"}, {"d"})
    chunked = split(module, 4)
    arguments = numbers(chunked.lowered().program)
    x, w, filled = arguments[:3]
    sizes = np.random.default_rng(0).integers(0, 2, (4, 4, 2))
    starts, sizes, places = routed(sizes)
    for d in range(4):
        for k, own in enumerate((starts[d], sizes[d], places[d], sizes[:, d])):
            arguments[3 + k][d] = own.reshape(-1).astype("i4")
    there = [a.copy() for a in filled]
    for s, t, u in np.argwhere(sizes):
        there[t][places[s, t, u]] = x[s][starts[s, t, u]]
    program, got = ran(chunked, arguments)
    assert kinds(program) == {Kind.RAGGED_ALL_TO_ALL: 4}
    for d in range(4):
        np.testing.assert_array_equal(got.results[0][d], w[d].T @ there[d])


@pytest.mark.parametrize("place", [15, -1])
def test_ragged_rows_outside_of_the_buffer_are_an_error_in_parts_too(place: int) -> None:
    module = partitioned(RAGGED, 4)
    for made in (module, split(module, 4)):
        arguments = numbers(made.lowered().program)
        for k in range(4, 10):
            arguments[k] = [np.zeros(8, "i4") for _ in range(4)]
        arguments[5][2][0] = arguments[7][0][4] = 2  # two rows from device 2 to 0
        arguments[6][2][0] = place
        with pytest.raises(RuntimeError, match="device 0 receives rows outside its output"):
            ran(made, arguments)


def test_ragged_rows_stay_whole_whose_numbers_may_not_be_compared() -> None:
    """They are clipped by differences, which unsigned ones and those of several types do not have."""
    for text in (RAGGED.replace("s32[", "u32["), RAGGED.replace("sizes = s32[", "sizes = s64[")):
        assert not regions(partitioned(text, 4))


def test_ragged_rows_in_an_order_that_is_computed_stay_whole() -> None:
    """Rows are picked out of all that arrive before they are multiplied."""
    text = RAGGED.replace("dot(there", "dot(picked").replace(
        "  d =",
        """  order = s32[16] iota(), iota_dimension=0
  backwards = s32[16] negate(order)
  picked = f32[16,5] gather(there, backwards), offset_dims={1}, collapsed_slice_dims={0},
    start_index_map={0}, index_vector_dim=1, slice_sizes={1,5}
  d =""",
    )
    ((_, _, region),) = regions(partitioned(text, 4))
    assert "there" not in names(region)[0]
