"""Groups along mesh axes of one device, against the groups counted out by hand."""

from __future__ import annotations

import pytest

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.groups import replica_groups
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.text_groups import spell_out_groups

TEXT = """HloModule m, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%x), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true,
    to_apply=%sum
}
"""
ALONE = [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['x'=1,'y'=4] {'x'}", ALONE),
        ("mesh['x'=4,'y'=1] {'y'}", ALONE),
        ("mesh['x'=2,'y'=1,'z'=2] {'y'}", ALONE),
        ("mesh['x'=2,'y'=1,'z'=2] {'x','y'}", [(0, 2), (1, 3)]),
        ("mesh['x'=2,'y'=1,'z'=2] {'y','z'}", [(0, 1), (2, 3)]),
        ("mesh['x'=2,'y'=2] {'x'}", [(0, 2), (1, 3)]),
        ("mesh['x'=1,'y'=4] {'x','y'}", [(0, 1, 2, 3)]),
    ],
)
def test_groups_are_those_of_the_axes(groups: str, expected: list[tuple[int, ...]]) -> None:
    module = Module.parse(parse_hlo_text(TEXT.replace("GROUPS", groups)))
    (reduce,) = [i for i in module.entry.instructions if i.opcode == "all-reduce"]
    assert sorted(replica_groups(reduce, 1, 4)) == expected


def test_other_text_is_left_alone() -> None:
    for groups in ("mesh['x'=2,'y'=2] {'x'}", "[2,2]<=[4]", "{{0,1},{2,3}}", "mesh['x'=1] {'z'}"):
        text = TEXT.replace("GROUPS", groups)
        assert spell_out_groups(text) == text
    huge = TEXT.replace("GROUPS", "mesh['x'=1,'y'=99999999999] {'x'}")
    assert spell_out_groups(huge) == huge
