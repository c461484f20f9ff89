"""Replica groups: the three spellings, the four modes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.groups import group_mode, parse_pairs, replica_groups, source_target_pairs
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.errors import InvalidProgramError


def instruction(op: str, attributes: str):
    reducer = ", to_apply=add" if op == "all-reduce" else ""
    module = f"""HloModule m
    add {{
      a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] add(a, b)
    }}
    ENTRY e {{
      p = f32[8] parameter(0)
      ROOT r = f32[8] {op}(p), {attributes}{reducer}
    }}"""
    return Module.parse(parse_hlo_text(module)).entry.root


FLAT = "channel_id=1, use_global_device_ids=true, replica_groups="

# Expected groups checked by values on XLA's CPU backend or worked out by hand.
SPELLINGS = {
    "{{0,1},{2,3}}": [(0, 1), (2, 3)],
    "{{3,1,0},{2}}": [(3, 1, 0), (2,)],
    "[2,2]<=[4]": [(0, 1), (2, 3)],
    "[2,2]<=[2,2]T(1,0)": [(0, 2), (1, 3)],
    "[1,4]<=[4]": [(0, 1, 2, 3)],
    "mesh['x'=2,'y'=2] {'y'}": [(0, 1), (2, 3)],
    "mesh['x'=2,'y'=2] {'x'}": [(0, 2), (1, 3)],
    "mesh['x'=2,'y'=2] {'x','y'}": [(0, 1, 2, 3)],
    "mesh['x'=2,'y'=2] {'y','x'}": [(0, 2, 1, 3)],
    "mesh['x'=4] {'x':(1)2}": [(0, 2), (1, 3)],
    "mesh['x'=4] {'x':(2)2}": [(0, 1), (2, 3)],
    "mesh['x'=2,'y'=2], device_ids=(3,2,1,0) {'y'}": [(3, 2), (1, 0)],
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_spellings(text):
    found = instruction("all-reduce", FLAT + text)
    assert sorted(replica_groups(found, 1, 4)) == sorted(SPELLINGS[text])


# (op, attributes) -> groups of flattened ids with 2 replicas of 2 partitions (id = 2 * r + p).
MODES = {
    ("all-reduce", "replica_groups={{0,1}}"): [(0, 2), (1, 3)],
    ("all-reduce", "channel_id=1, replica_groups={{0},{1}}"): [(0, 1), (2, 3)],
    ("all-reduce", "channel_id=1, replica_groups={{1,0}}"): [(2, 3, 0, 1)],
    ("all-reduce", FLAT + "{{0,3},{1,2}}"): [(0, 3), (1, 2)],
    ("all-reduce", "replica_groups={}"): [(0, 2), (1, 3)],
    ("collective-broadcast", "replica_groups={{1,0}}"): [(2, 0), (3, 1)],
    ("collective-broadcast", "channel_id=1, replica_groups={{1,0}}"): [(1, 0), (3, 2)],
    ("all-to-all", "channel_id=1, replica_groups={{0,1}}, dimensions={0}"): [(0, 1), (2, 3)],
}


@pytest.mark.parametrize(("op", "attributes"), MODES)
def test_modes(op, attributes):
    found = replica_groups(instruction(op, attributes), 2, 2)
    assert sorted(found) == sorted(MODES[op, attributes])


def test_pairs_count_partitions_with_a_channel_and_replicas_without():
    attributes = "source_target_pairs={{0,1}}"
    assert source_target_pairs(instruction("collective-permute", attributes), [(0, 1)], 2, 2) == [
        (0, 2),
        (1, 3),
    ]
    with_channel = instruction("collective-permute", "channel_id=1, " + attributes)
    assert source_target_pairs(with_channel, [(0, 1)], 2, 2) == [(0, 1), (2, 3)]


def test_flag_without_channel():
    found = instruction("all-reduce", FLAT + "{{0,1}}")
    found.proto.channel_id = 0
    with pytest.raises(InvalidProgramError, match=r"r .all-reduce.*needs a channel_id"):
        group_mode(found)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (FLAT + "{{0,4}}", "id 4 .* out of range"),
        (FLAT + "{{0,1},{1,2}}", "id 1 occurs twice"),
        (FLAT + "{}", "must be given"),
    ],
)
def test_refused(attributes, message):
    with pytest.raises(InvalidProgramError, match=message):
        replica_groups(instruction("all-reduce", attributes), 1, 4)


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
)
def test_mesh_axes_against_coordinates(sizes, data):
    """Members share all coordinates but those of the listed axes; the last listed runs fastest."""
    axes = data.draw(st.permutations(range(len(sizes))))
    axes = axes[: data.draw(st.integers(1, len(sizes)))]
    found = instruction("all-reduce", FLAT + "{{0}}")
    spelled = found.proto.mesh_axes_replica_group_list
    for i, size in enumerate(sizes):
        spelled.mesh.axes.add(name=f"a{i}", size=size)
    for axis in axes:
        spelled.axes.add(mesh_axis_index=axis)
    expected: dict[tuple, list] = {}
    for device, coordinates in enumerate(np.ndindex(*sizes)):
        key = tuple(c for i, c in enumerate(coordinates) if i not in axes)
        expected.setdefault(key, []).append((tuple(coordinates[a] for a in axes), device))
    groups = {tuple(device for _, device in sorted(members)) for members in expected.values()}
    assert set(replica_groups(found, 1, int(np.prod(sizes)))) == groups


def test_pairs_as_text():
    found = instruction("all-reduce", FLAT + "{{0,1}}")
    assert parse_pairs(found, "{{0,1}, {2,3}}") == [(0, 1), (2, 3)]
    assert parse_pairs(found, "{}") == []
    for bad in ("{{0}}", "0,1", "{{a,b}}", "{{0,1},}"):
        with pytest.raises(InvalidProgramError, match="not a list of pairs"):
            parse_pairs(found, bad)
