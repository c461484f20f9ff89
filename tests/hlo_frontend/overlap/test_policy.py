"""By which table of costs the programs of a world are scheduled."""

from __future__ import annotations

import pytest

from stretto.hlo_frontend.overlap.policy import policy_of
from stretto.runtime.errors import WorldError

TABLE = '{"compute": {"flops_per_s": 1, "bytes_per_s": 1}, "links": []}'


def test_the_table_that_is_named_counts_as_it_is() -> None:
    named = policy_of(TABLE, ["one"], origin="costs.json", named=True)
    measured = policy_of(TABLE, ["one"], origin="costs.json")
    assert named is not None and not named.costs.estimates
    assert measured is not None and measured.costs.estimates


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, TABLE.replace("1", "-1")])
def test_a_named_file_that_is_no_table_is_an_error(text: str) -> None:
    with pytest.raises(WorldError, match=r"^costs\.json is no table of costs: "):
        policy_of(text, ["one"], origin="costs.json", named=True)


def test_without_a_table_ranks_on_several_hosts_have_an_ordinary_network() -> None:
    assert policy_of("", ["one", "one"]) is None
    assert policy_of("", ["one", "two"]) is not None
    assert policy_of("", ["one", "two"], enabled=False) is None


def test_gpus_are_scheduled_without_a_table_too() -> None:
    alone = policy_of("", ["one"], lowered_as="cuda")
    apart = policy_of("", ["one", "two"], lowered_as="cuda")
    assert alone is not None and apart is not None
    (near,), (far,) = alone.costs.links, apart.costs.links
    assert near.bytes_per_s > far.bytes_per_s and alone.costs.estimates
    assert policy_of("", ["one"], lowered_as="cuda", enabled=False) is None
    named = policy_of(TABLE, ["one"], origin="costs.json", named=True, lowered_as="cuda")
    assert named == policy_of(TABLE, ["one"], origin="costs.json", named=True)
