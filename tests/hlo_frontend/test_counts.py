"""Devices that a module is for where its header says nothing: from its collectives, counted by hand."""

from __future__ import annotations

import pytest

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.source import read_hlo
from stretto.runtime.errors import InvalidProgramError

DEVICES = 5  # where nothing tells


def text(*lines: str, header: str = "HloModule m") -> str:
    body = "\n".join(lines)
    return f"""{header}
add {{
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}}
ENTRY e {{
  p = f32[4,6] parameter(0)
  {body}
}}
"""


def counts(*lines: str, header: str = "HloModule m") -> tuple[int, int]:
    return read_hlo(text(*lines, header=header).encode()).counts(DEVICES)


FLAT = "channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ROOT r = f32[12,6] all-gather(p), replica_groups={}, dimensions={0}"], (3, 1)),
        (["ROOT r = f32[4,2] reduce-scatter(p), dimensions={1}, to_apply=add"], (3, 1)),
        # With a channel and without the flag a group has all partitions of its replicas.
        (
            ["ROOT r = f32[8,6] all-gather(p), dimensions={0}, channel_id=1, replica_groups={{0}}"],
            (1, 2),
        ),
        (
            ["ROOT r = f32[4,1] reduce-scatter(p), dimensions={1}, to_apply=add, channel_id=1, "
             "replica_groups={{0,1}}"],
            (2, 3),
        ),
        (["ROOT r = f32[8,6] all-gather(p), dimensions={0}, channel_id=1"], (1, 2)),
        (["ROOT r = (f32[4,6], f32[4,6]) all-to-all(p, p), replica_groups={}"], (2, 1)),
        (["ROOT r = (f32[4,6], f32[4,6]) all-to-all(p, p), channel_id=1"], (1, 2)),
        (
            ["s = (f32[4,6], f32[4,24]) all-gather-start(p), dimensions={1}",
             "ROOT r = f32[4,24] all-gather-done(s)"],
            (4, 1),
        ),
        # Flattened ids are of all devices: 2 replicas, so of 2 partitions each.
        (
            [f"a = f32[4,6] all-reduce(p), to_apply=add, replica_groups={{{{0,1,2,3}}}}, {FLAT}",
             "ROOT r = f32[4,6] all-reduce(a), to_apply=add, replica_groups={{0,1}}"],
            (2, 2),
        ),
        # Devices are what the program asks for: replicas here, partitions where it does not say.
        (
            ["i = u32[] replica-id()", "j = f32[] convert(i)",
             f"ROOT r = f32[] all-reduce(j), to_apply=add, replica_groups={{{{0,1}}}}, {FLAT}"],
            (2, 1),
        ),
        (
            ["i = u32[] partition-id()", "j = f32[] convert(i)", "k = u32[] replica-id()",
             f"ROOT r = f32[] all-reduce(j), to_apply=add, replica_groups={{{{0,1}}}}, {FLAT}"],
            (1, 2),
        ),
        (["ROOT r = f32[4,6] all-reduce(p), to_apply=add, replica_groups={}"], (DEVICES, 1)),
        (["ROOT r = f32[4,6] all-reduce(p), to_apply=add, channel_id=1"], (1, DEVICES)),
        (["ROOT r = f32[4,6] negate(p)"], (1, DEVICES)),
    ],
)  # fmt: skip
def test_what_collectives_need(lines: list[str], expected: tuple[int, int]) -> None:
    assert counts(*lines) == expected


@pytest.mark.parametrize(
    "header",
    [
        "HloModule m, replica_count=2, num_partitions=3",
        "// made by hand\n\nHloModule m, replica_count=2, num_partitions=3",
        "HloModule m,\n  is_scheduled=true, /* replica_count=7, */\n  replica_count=2,\n num_partitions=3",
        "HloModule m, entry_computation_layout={(f32[4,6]{1,0})->f32[4,6]{1,0}},\n"
        "replica_count=2, num_partitions=3",
    ],
)
def test_a_header_that_says_it_stands_anywhere_before_the_computations(header: str) -> None:
    line = 'ROOT r = f32[4,6] negate(p), metadata={op_name="num_partitions=9"}'
    assert counts(line, header=header) == (2, 3)


@pytest.mark.parametrize(
    ("header", "line", "expected"),
    [
        ("num_partitions=1", "all-reduce(p), to_apply=add, replica_groups={{0,1},{2,3}}", (4, 1)),
        ("num_partitions=1", f"all-reduce(p), to_apply=add, replica_groups={{{{0,1}}}}, {FLAT}", (2, 1)),
        ("num_partitions=1", "collective-permute(p), source_target_pairs={{0,1},{1,2}}", (3, 1)),
        ("num_partitions=1", "negate(p)", (1, 1)),
        ("num_partitions=2", "all-reduce(p), to_apply=add, replica_groups={{0,1}}", (1, 2)),
        ("replica_count=1, num_partitions=1", "collective-permute(p), source_target_pairs={{0,1}}", (1, 1)),
    ],
)  # fmt: skip
def test_one_partition_leaves_open_how_many_replicas(
    header: str, line: str, expected: tuple[int, int]
) -> None:
    assert counts(f"ROOT r = f32[4,6] {line}", header=f"HloModule m, {header}") == expected


def test_shapes_that_contradict_each_other_say_where_counts_come_from() -> None:
    module = text(
        "g = f32[8,6] all-gather(p), replica_groups={}, dimensions={0}",
        "ROOT r = f32[12,6] all-gather(p), replica_groups={}, dimensions={0}",
    )
    source = read_hlo(module.encode())
    with pytest.raises(InvalidProgramError, match=r"g \(all-gather\).*groups of 3.*replica_count="):
        compile_hlo(source.module, *source.counts(1))


def test_shapes_that_make_no_sense_tell_nothing() -> None:
    assert counts("ROOT r = f32[5,6] all-gather(p), replica_groups={}, dimensions={0}") == (
        DEVICES,
        1,
    )
