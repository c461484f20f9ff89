"""Prices against values worked out by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from overlap_support import FAR, NEAR, block, module, table

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType
from stretto.hlo_frontend.flops import flops
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link, span, wire_bytes
from stretto.runtime.errors import InvalidProgramError

SMALL, LARGE = TensorType("f32", (8,)), TensorType("f32", (32,))
GROUPS = ((0, 8, 16, 24), (1, 9, 17, 25))
# Of a mesh of two rows of four, and of all eight; and every second of four.
SPANS = ((2, 2), (1, 4), (4, 2), (1, 8))


@pytest.mark.parametrize(
    ("kind", "operand", "result", "expected"),
    [
        (Kind.ALL_GATHER, SMALL, LARGE, 0.75 * 128),
        (Kind.REDUCE_SCATTER, LARGE, SMALL, 0.75 * 128),
        (Kind.ALL_REDUCE, LARGE, LARGE, 1.5 * 128),
        (Kind.ALL_TO_ALL, LARGE, LARGE, 0.75 * 128),
        (Kind.BROADCAST, LARGE, LARGE, 128),
    ],
)
def test_wire_bytes_of_a_ring_of_four(
    kind: Kind, operand: TensorType, result: TensorType, expected: float
) -> None:
    collective = Collective(kind, (operand,), (result,), groups=GROUPS)
    assert span(collective) == (8, 4)
    assert wire_bytes(collective, 4) == expected
    costs = CostTable(Compute(1.0, 1.0), (Link(8, 4, 5.0, 2.0),))
    assert costs.collective(collective).seconds == 5.0 + expected / 2.0


@pytest.mark.parametrize(("operand", "result"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_ragged_exchange_moves_no_more_rows_than_fit(
    operand: TensorType, result: TensorType
) -> None:
    numbers = (TensorType("s32", (4,)),) * 4
    given = (operand, result, *numbers)
    assert wire_bytes(Collective(Kind.RAGGED_ALL_TO_ALL, given, (result,)), 4) == 0.75 * 32


def test_point_to_point_moves_all_and_spans_what_its_pairs_connect() -> None:
    ring = ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))
    permute = Collective(Kind.PERMUTE, (SMALL,), (SMALL,), pairs=ring)
    assert span(permute) == (2, 3)
    assert wire_bytes(permute, 3) == 32
    receive = Collective(Kind.RECV, (), (LARGE,), pairs=((0, 1),))
    assert span(receive) == (1, 2)
    assert wire_bytes(receive, 2) == 128


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (((0, 2), (1, 3)), 2),  # an entry of their own: stride 2, two devices
        (((5, 6), (6, 5)), 4),  # two of the four next to each other
        (((0, 1), (1, 3), (3, 0)), 4),
        (((1, 5), (2, 6)), 5),  # of different rows, in one column
        (((1, 2), (3, 4)), 8),  # the second pair of different rows and columns
    ],
)
def test_a_permute_without_an_entry_goes_by_the_closest_that_connects_it(
    pairs: tuple[tuple[int, int], ...], expected: float
) -> None:
    rates = (2.0, 4.0, 5.0, 8.0)
    links = [Link(*at, 0.0, rate) for at, rate in zip(SPANS, rates, strict=True)]
    costs = CostTable(Compute(1.0, 1.0), tuple(links))
    permute = Collective(Kind.PERMUTE, (SMALL,), (SMALL,), pairs=pairs, name="shift.1")
    assert costs.collective(permute).seconds == 32 / expected
    narrow = CostTable(Compute(1.0, 1.0), tuple(links[:1]))
    if expected > 2:
        with pytest.raises(InvalidProgramError, match=r"shift\.1.*axis_stride . and group_size ."):
            narrow.collective(permute)


def test_groups_of_one_are_copies_and_need_no_link() -> None:
    alone = Collective(Kind.ALL_REDUCE, (LARGE,), (LARGE,), groups=((0,), (1,)))
    charge = CostTable(Compute(1.0, 64.0), ()).collective(alone)
    assert (charge.seconds, charge.wire_bytes) == (2 * 128 / 64, 0.0)


def test_a_group_without_an_entry_is_an_error_that_names_stride_and_size() -> None:
    gather = Collective(Kind.ALL_GATHER, (SMALL,), (LARGE,), groups=GROUPS, name="gather.7")
    with pytest.raises(InvalidProgramError, match=r"gather\.7.*axis_stride 8.*group_size 4"):
        table().collective(gather)


def test_a_table_is_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    link = {"axis_stride": 1, "group_size": 2, "latency_s": 1e-5, "bytes_per_s": 1e9}
    compute = {"flops_per_s": 1e12, "bytes_per_s": 1e11, "launch_s": 1e-6}
    path.write_text(json.dumps({"compute": compute, "links": [link]}))
    assert CostTable.read(path) == CostTable(Compute(1e12, 1e11, 1e-6), (Link(1, 2, 1e-5, 1e9),))
    path.write_text(json.dumps({"compute": compute, "links": [link | {"busy": 0.5}]}))
    assert CostTable.read(path).links == (Link(1, 2, 1e-5, 1e9, busy=0.5),)


COMPUTE = {"flops_per_s": 1, "bytes_per_s": 1.0}
LINK = {"axis_stride": 1, "group_size": 2, "latency_s": 0, "bytes_per_s": 1}


def with_link(**changed: object) -> object:
    return {"compute": COMPUTE, "links": [LINK | {"group_size": 4}, LINK | changed]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "it is [], and should be an object"),
        (None, "it is null, and should be an object"),
        ({"links": []}, "it has no compute"),
        ({"compute": COMPUTE}, "it has no links"),
        ({"compute": [1, 2], "links": []}, "compute is [1, 2], and should be an object"),
        ({"compute": COMPUTE | {"speed": 0}, "links": []}, 'compute has "speed", which is none of flops_'),
        ({"compute": {"flops_per_s": 1}, "links": []}, "compute has no bytes_per_s"),
        ({"compute": COMPUTE | {"bytes_per_s": 0}, "links": []}, "bytes_per_s of compute is 0, and should"),
        ({"compute": COMPUTE | {"bytes_per_s": 1e-300}, "links": []}, "bytes_per_s of compute is 1e-300, "),
        ({"compute": COMPUTE | {"bytes_per_s": math.nan}, "links": []}, "bytes_per_s of compute is NaN, "),
        ({"compute": COMPUTE | {"launch_s": math.inf}, "links": []}, "launch_s of compute is Infinity, and "),
        ({"compute": COMPUTE | {"launch_s": 10**400}, "links": []}, "launch_s of compute is a number of "),
        ({"compute": COMPUTE, "links": {}}, "links is {}, and should be a list"),
        ({"compute": COMPUTE, "links": "none"}, 'links is "none", and should be a list'),
        ({"compute": COMPUTE, "links": [[1, 8]]}, "links[0] is [1, 8], and should be an object"),
        ({"compute": COMPUTE, "links": [{"axis_stride": 1}]}, "links[0] has no group_size"),
        (with_link(axis_stride=1.5), "axis_stride of links[1] is 1.5, and should be a whole number"),
        (with_link(axis_stride=math.inf), "axis_stride of links[1] is Infinity, and should be a whole"),
        (with_link(group_size=-8), "group_size of links[1] is -8, and should be a whole number"),
        (with_link(group_size=True), "group_size of links[1] is true, and should be a whole number"),
        (with_link(latency_s="1"), 'latency_s of links[1] is "1", and should be seconds from 0 to 1e+09'),
        (with_link(latency_s=None), "latency_s of links[1] is null, and should be seconds"),
        (with_link(busy=2), "busy of links[1] is 2, and should be a share, from 0 to 1"),
        (with_link(group_size=4, busy=1), "links[0] and links[1] are both for axis_stride 1 and"),
    ],
)  # fmt: skip
def test_what_is_not_a_cost_table_is_an_error_that_names_the_field(
    content: object, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidProgramError) as caught:
        CostTable.read(path)
    assert str(caught.value).startswith(f"{path}: not a cost table: {problem}")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\0", '{"compute": }'])
def test_what_is_not_json_is_an_error(text: str) -> None:
    with pytest.raises(InvalidProgramError, match="is not JSON"):
        CostTable.parse(text)


@pytest.mark.parametrize("data", [b"\xff\xfe{", None], ids=["not text", "no file"])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, data: bytes | None
) -> None:
    path = tmp_path / "costs.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(
        InvalidProgramError, match=re.escape(f"the table of costs {path} cannot be read: ")
    ):
        CostTable.read(path)


def test_keys_of_links_that_are_not_known_are_left_alone() -> None:
    (link,) = CostTable.from_json({"compute": COMPUTE, "links": [LINK | {"name": "x"}]}).links
    assert link == Link(1, 2, 0.0, 1.0)


def test_flops_by_hand() -> None:
    found = module(
        """
        %x = f32[2,6,6,3] parameter(0)
        %k = f32[3,3,3,5] parameter(1)
        %c = f32[2,4,4,5] convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f
        %a = f32[4,7] parameter(2)
        %b = f32[7,9] parameter(3)
        %d = f32[4,9] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        %z = f32[] constant(0)
        %r = f32[4] reduce(%d, %z), dimensions={1}, to_apply=%sum
        %t = f32[9,4] transpose(%d), dimensions={1,0}
        %e = f32[4] exponential(%r)
        ROOT %out = (f32[2,4,4,5], f32[9,4], f32[4]) tuple(%c, %t, %e)
        """
    )
    by_name = {i.name: flops(i) for i in found.entry.instructions}
    assert by_name["c"] == 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)
    assert by_name["d"] == 2 * (4 * 9) * 7
    assert by_name["r"] == 4 * (9 - 1)
    assert (by_name["t"], by_name["e"]) == (0, 4)


def test_branches_count_as_often_as_they_are_said_to_be_taken() -> None:
    """And where nobody says it, the one that does most."""
    branches = """
        %long (a: f32[64,64]) -> f32[64,64] {
          %a = f32[64,64] parameter(0)
          ROOT %d = f32[64,64] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        }
        %short (b: f32[64,64]) -> f32[64,64] {
          %b = f32[64,64] parameter(0)
          ROOT %n = f32[64,64] negate(%b)
        }
        """
    entry = """
        %x = f32[64,64] parameter(0)
        %p = pred[] parameter(1)
        ROOT %c = f32[64,64] conditional(%p, %x, %x), true_computation=%long, false_computation=%short
        """
    long, short = 2 * 64**3, 64**2
    said = ', frontend_attributes={stretto_share="0.25"}'
    assert flops(module(entry, branches).entry.root) == long
    found = module(entry.rstrip() + said, branches).entry.root
    assert flops(found) == long / 4 + short * 3 / 4


def test_streams_are_sets_of_groups_with_point_to_point_apart() -> None:
    from stretto.hlo_frontend.overlap.kernels import build

    found = module(
        f"""
        %x = f32[32] parameter(0)
        %a = f32[64] all-gather(%x), {NEAR}, dimensions={{0}}
        %b = f32[64] all-gather(%x), {FAR}, dimensions={{0}}
        %c = f32[32] all-reduce(%x), {NEAR}, to_apply=%sum
        %p = f32[32] collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
        ROOT %out = (f32[64], f32[64], f32[32], f32[32]) tuple(%a, %b, %c, %p)
        """
    )
    graph = build(block(found), table())
    streams = {task.name: graph.streams[task.stream] for task in graph.tasks}
    assert streams == {"a": "stride1x2", "b": "stride2x2", "c": "stride1x2", "p": "p2p"}
