"""Memory for messages of collectives that compiled code calls: see `stretto.collectives.native`."""

from __future__ import annotations

import pytest

from stretto.collectives.native import Peers, Table, table_of
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

# Two processes with two devices each.
PEERS = Peers(0, {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 1: 1}, first_tag=0, last_tag=99)
ACROSS = ((0, 2), (1, 3))
ALL = ((0, 1, 2, 3),)


def sum_of(size: int, groups: tuple[tuple[int, ...], ...]) -> Collective:
    type_ = TensorType("f32", (size,))
    return Collective(
        Kind.ALL_REDUCE, (type_,), (type_,), groups, reduction=Reduction.SUM, name=f"sum{size}"
    )


def table(*collectives: Collective, resumed: bool = False) -> Table:
    return table_of(collectives, {0: 0, 1: 1}, PEERS, resumed=resumed)


def stage(size: int) -> int:
    """Of a sum over two processes: what each of them gives."""
    return 2 * 4 * size


@pytest.mark.parametrize("sizes", [(8, 32, 16), (32, 16, 8)])
def test_sites_with_the_same_members_here_have_the_memory_of_the_largest(
    sizes: tuple[int, ...],
) -> None:
    assert table(*(sum_of(size, ALL) for size in sizes)).stages == [stage(32)]


def test_members_in_another_order_are_the_same_ones() -> None:
    assert table(sum_of(8, ALL), sum_of(8, ((1, 0, 3, 2),))).stages == [stage(8)]


def test_groups_that_may_be_under_way_at_the_same_time_share_none() -> None:
    """Devices 0 and 1 meet others each, and then each other."""
    found = table(sum_of(8, ACROSS), sum_of(16, ALL), sum_of(32, ACROSS)).stages
    assert found == [stage(32), stage(32), stage(16)]


def test_groups_of_this_process_alone_need_none() -> None:
    assert table(sum_of(8, ((0, 1), (2, 3)))).stages == []


def test_sites_that_may_give_their_results_again_keep_them() -> None:
    found = table(sum_of(8, ALL), sum_of(32, ALL), sum_of(8, ALL), resumed=True).stages
    assert found == [stage(8), stage(32), stage(8)]
