"""`stretto explain FILE --costs COSTS.json`: the schedule as data, the ledger as text, bad tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.testing_replay import replay_steps

DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
# A dot takes 1024 operations or, with 16 columns, 2048; the gather moves half of 512 bytes.
MODULE = f"""HloModule m, num_partitions=4

ENTRY %e {{
  %x = f32[8,8] parameter(0)
  %w = f32[64] parameter(1)
  %a = f32[8,8] dot(%x, %x), {DOT}
  %g = f32[128] all-gather(%w), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}},
    use_global_device_ids=true, dimensions={{0}}
  %m = f32[8,16] reshape(%g)
  ROOT %c = f32[8,16] dot(%a, %m), {DOT}
}}
"""
COMPUTE = {"flops_per_s": 1024.0, "bytes_per_s": 1e30, "launch_s": 0.25}
LINK = {"axis_stride": 1, "group_size": 2, "latency_s": 0.5, "bytes_per_s": 128.0}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "m.hlo"
    path.write_text(MODULE)
    return str(path)


def table(tmp_path: Path, content: object) -> str:
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_steps_can_be_replayed_without_the_table(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = table(tmp_path, {"compute": COMPUTE, "links": [LINK]})
    assert main(["explain", file, "--costs", costs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ("name", "kind", "stream", "seconds", "bytes", "collective", "depends_on")
    assert [tuple(step[k] for k in keys) for step in found["steps"]] == [
        ("g", "start", "stride1x2", 0.5 + 256 / 128, 256, "g", []),
        ("a", "compute", "compute", 0.25 + 1.0, 2 * 256, None, []),
        ("g", "wait", "stride1x2", 0.0, 0, "g", ["g"]),
        ("c", "compute", "compute", 0.25 + 2.0, 256 + 2 * 512, None, ["a", "g"]),
    ]
    # The arguments, the gather's result; a's result; nothing; c's result, x being an argument.
    assert [s["memory_delta"] for s in found["steps"]] == [256 + 256 + 512, 256, 0, 512]
    replayed = replay_steps(found["steps"])
    assert (replayed.seconds, replayed.exposed_seconds) == (2.5 + 2.25, 1.25)
    summary = found["summary"]
    assert (summary["predicted_ms"], summary["exposed_ms"]) == (4750.0, 1250.0)
    # One after the other: a, the gather, c.
    assert (summary["unscheduled_ms"], summary["unscheduled_exposed_ms"]) == (6000.0, 2500.0)
    assert replayed.peak_bytes == summary["peak_bytes"] == 1024 + 256 + 512


def test_the_ledger_says_what_hides_it_and_why_it_is_not_moved(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = table(tmp_path, {"compute": COMPUTE, "links": [LINK]})
    assert main(["explain", file, "--costs", costs]) == 0
    printed = capsys.readouterr().out
    assert "2500000.0 us 1250000.0 us  all-gather %g on stride1x2; not earlier: " in printed
    assert "not later: c needs it" in printed
    assert "behind a 1000000.0 us" in printed or "behind a 1250000.0 us" in printed
    assert "hideable 1, overlapped 1, fully hidden 0" in printed
    assert "exposed 1250.000 ms (floor" in printed


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"compute": COMPUTE, "links": []}, "g: the cost table has no link for groups of axis_stride 1"),
        ({"compute": COMPUTE, "links": [{**LINK, "bytes_per_s": 0}]}, "rates must be positive"),
        ({"compute": {"flops_per_s": 1.0}, "links": []}, "not a cost table"),
        ({"compute": {**COMPUTE, "launch_s": "soon"}, "links": []}, "not a cost table"),
        ([1, 2], "not a cost table"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used(
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: object,
    problem: str,
) -> None:
    assert main(["explain", file, "--costs", table(tmp_path, content), "--json"]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err and captured.err.startswith("stretto explain: ")
    assert captured.out == ""


def test_a_module_that_contradicts_itself_is_named_as_without_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "m.hlo"
    module.write_text(MODULE.replace("%a = f32[8,8] dot", "%a = f32[8,7] dot"))
    costs = table(tmp_path, {"compute": COMPUTE, "links": [LINK]})
    said = []
    for more in ([], ["--costs", costs]):
        assert main(["explain", str(module), *more]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "a (dot): cannot make f32[8,7]" in said[0]


def test_a_table_that_is_not_there(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", file, "--costs", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


LOOP = f"""HloModule m, num_partitions=4

%cond (q: (s32[], f32[8,8], f32[32], f32[4096])) -> pred[] {{
  %q = (s32[], f32[8,8], f32[32], f32[4096]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(8)
  ROOT %t = pred[] compare(%j, %n), direction=LT
}}

%body (p: (s32[], f32[8,8], f32[32], f32[4096])) -> (s32[], f32[8,8], f32[32], f32[4096]) {{
  %p = (s32[], f32[8,8], f32[32], f32[4096]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8] get-tuple-element(%p), index=1
  %w = f32[32] get-tuple-element(%p), index=2
  %z = f32[4096] get-tuple-element(%p), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %g = f32[64] all-gather(%w), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}},
    use_global_device_ids=true, dimensions={{0}}
  %m = f32[8,8] reshape(%g)
  %d = f32[8,8] dot(%x, %m), {DOT}
  ROOT %all = (s32[], f32[8,8], f32[32], f32[4096]) tuple(%next, %d, %w, %z)
}}

ENTRY %e {{
  %start = s32[] constant(0)
  %a = f32[8,8] parameter(0)
  %b = f32[32] parameter(1)
  %c = f32[4096] parameter(2)
  %init = (s32[], f32[8,8], f32[32], f32[4096]) tuple(%start, %a, %b, %c)
  %loop = (s32[], f32[8,8], f32[32], f32[4096]) while(%init), condition=%cond, body=%body
  ROOT %r = f32[8,8] get-tuple-element(%loop), index=1
}}
"""


def test_what_becomes_of_a_loop_as_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gather of a second and a dot of a second: the next iteration's gather runs beside the dot. Seven
    iterations of a second and one of two, and what is alive anyway leaves memory for two gathered weights."""
    free = {"compute": COMPUTE | {"launch_s": 0.0}, "links": [LINK | {"latency_s": 0.0}]}
    path = tmp_path / "loop.hlo"
    path.write_text(LOOP)
    costs = table(tmp_path, free)
    assert main(["explain", str(path), "--costs", costs, "--json"]) == 0
    (loop,) = json.loads(capsys.readouterr().out)["summary"]["loops"]
    assert (loop["name"], loop["trips"], loop["early"], loop["late"], loop["why"]) == (
        "loop", 8, ["g"], [], "",
    )  # fmt: skip
    assert loop["before_ms"] == pytest.approx(2000.0, rel=0.01)
    assert loop["after_ms"] == pytest.approx(1125.0, rel=0.01)
    assert main(["explain", str(path), "--costs", costs]) == 0
    printed = capsys.readouterr().out
    assert "loop %loop, 8 iterations: " in printed
    assert "inside %loop, body, 7 iterations: predicted 1000." in printed
    assert "as 1 begin early (%g), 7" in printed

    # What the next iteration reads cannot be gathered before this one has made it.
    path.write_text(
        LOOP.replace("all-gather(%w)", "all-gather(%s)").replace(
            "  %g = ",
            "  %y = f32[64] reshape(%x)\n  %s = f32[32] slice(%y), slice={[0:32]}\n  %g = ",
        )
    )
    assert main(["explain", str(path), "--costs", costs]) == 0
    printed = capsys.readouterr().out
    assert "no collective crosses: none of its collectives can move" in printed
