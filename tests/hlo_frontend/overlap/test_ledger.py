"""The ledger and the JSON of schedules, the command, and the independent replay that judges them."""

from __future__ import annotations

import pytest
from overlap_support import DOT, FAR, NEAR, entry_of, loop_module, module, planned, table

from stretto.testing_replay import ReplayError, check_common_order, replay_steps

BODY = f"""
    %x = f32[8,8] parameter(0)
    %w = f32[64] parameter(1)
    %a = f32[8,8] dot(%x, %x), {DOT}
    %g = f32[128] all-gather(%w), {NEAR}, dimensions={{0}}
    %m = f32[8,16] reshape(%g)
    ROOT %c = f32[8,16] dot(%a, %m), {DOT}
"""


def test_a_half_hidden_gather() -> None:
    _, data, _ = planned(module(BODY), table(), memory_factor=2.0)
    entry = entry_of(data, "g")
    assert (entry["seconds"], entry["exposed"], entry["hideable"]) == (2.0, 1.0, 1.0)
    assert entry["hidden_by"] == [{"name": "a", "seconds": 1.0}]
    assert entry["why"] == (
        "not earlier: it starts with the program; "
        "not later: c needs it and no other work was left to do"
    )
    summary = data["summary"]
    counts = ("collectives", "hideable", "overlapped", "fully_hidden", "buckets")
    assert [summary[key] for key in counts] == [1, 1, 1, 0, 0]
    times = ("exposed_ms", "exposed_floor_ms", "predicted_ms", "compute_ms", "unscheduled_ms")
    assert [summary[key] for key in times] == [1000.0, 1000.0, 4000.0, 3000.0, 5000.0]


def test_what_another_wait_hides_is_not_overlapped() -> None:
    """Two gathers on two streams, with nothing to compute until both are there."""
    body = f"""
        %v = f32[64] parameter(0)
        %w = f32[64] parameter(1)
        %g = f32[128] all-gather(%v), {NEAR}, dimensions={{0}}
        %h = f32[128] all-gather(%w), {FAR}, dimensions={{0}}
        ROOT %s = f32[128] add(%g, %h)
    """
    _, data, _ = planned(module(body), table(), memory_factor=2.0)
    assert sorted(entry["exposed"] for entry in data["collectives"]) == [0.0, 2.0]
    counts = ("hideable", "overlapped", "fully_hidden")
    assert [data["summary"][key] for key in counts] == [0, 0, 1]


def test_launches_hide_communication_too() -> None:
    """Of the gather's two seconds a takes one, and its launch half a second."""
    _, data, _ = planned(module(BODY), table(launch_s=0.5), memory_factor=2.0)
    summary = data["summary"]
    times = ("exposed_ms", "exposed_floor_ms", "predicted_ms", "compute_ms", "floor_ms")
    assert [summary[key] for key in times] == [500.0, 0.0, 4500.0, 3000.0, 4000.0]


def test_steps_in_issue_order() -> None:
    _, data, _ = planned(module(BODY), table(), memory_factor=2.0)
    shown = [
        (s["name"], s["kind"], s["stream"], s["seconds"], s["bytes"], s["depends_on"], s["after"])
        for s in data["steps"]
    ]
    assert shown == [
        ("g", "start", "stride1x2", 2.0, 256, [], []),
        ("a", "compute", "compute", 1.0, 2 * 256, [], []),
        ("g", "wait", "stride1x2", 0.0, 0, ["g"], [0]),
        ("c", "compute", "compute", 2.0, 256 + 2 * 512, ["a", "g"], [1, 2]),
    ]
    arguments = 4 * (64 + 64)
    assert [s["memory_delta"] for s in data["steps"]] == [arguments + 512, 256, 0, 512]
    assert [s["collective"] for s in data["steps"]] == ["g", None, "g", None]


def test_the_replay_refuses_what_cannot_run() -> None:
    def step(name: str, kind: str, after: list[int], stream: str = "compute") -> dict:
        return {
            "name": name,
            "kind": kind,
            "stream": stream,
            "seconds": 1.0,
            "collective": None if kind == "compute" else name,
            "members": [name],
            "after": after,
            "memory_delta": 1,
        }

    a, s, w = step("a", "compute", []), step("g", "start", [0], "s"), step("g", "wait", [1], "s")
    good = [a, s, w, step("b", "compute", [2])]
    assert replay_steps(good).seconds == 3.0
    assert replay_steps(good).exposed_seconds == 1.0
    with pytest.raises(ReplayError, match="before its wait"):
        replay_steps([a, s, step("b", "compute", [1]), w])
    with pytest.raises(ReplayError, match="never waited for: g"):
        replay_steps([a, s])
    with pytest.raises(ReplayError, match="not in flight"):
        replay_steps([a, s, w, w])
    with pytest.raises(ReplayError, match="comes before step 1"):
        replay_steps([step("b", "compute", [1]), a])
    check_common_order([good, good])
    with pytest.raises(ReplayError, match="different orders"):
        check_common_order([good, [a, step("h", "start", [0], "s"), step("h", "wait", [1], "s")]])
    two = [step("g", "start", [], "s"), step("h", "start", [], "s")]
    fifo = [*two, step("h", "wait", [1], "s"), step("g", "wait", [0], "s")]
    assert replay_steps(fifo).exposed_by == {2: 2.0, 3: 0.0}


@pytest.mark.parametrize(("start", "trips"), [("constant(0)", 3), ("parameter(1)", None)])
def test_a_loop_is_one_step_with_a_ledger_of_its_own(start, trips) -> None:
    """An all-reduce of two seconds and a dot that needs it, three times; adding to the counter takes 1 ms."""
    _, data, _ = planned(loop_module(start, 3, 1, "LT"), table(), memory_factor=2.0)
    (step,) = data["steps"]
    assert (step["name"], step["kind"], step["trips"]) == ("loop", "compute", trips)
    condition, body = step["blocks"]
    assert (condition["block"], body["block"]) == ("condition", "body")
    assert condition["summary"]["collectives"] == 0
    assert (body["summary"]["collectives"], body["summary"]["exposed_ms"]) == (
        1,
        pytest.approx(2000.0, rel=1e-2),
    )
    assert [s["name"] for s in body["steps"] if s["kind"] != "compute"] == ["r", "r"]
    times = 1 if trips is None else trips
    assert step["seconds"] * 1e3 == pytest.approx(
        times * body["summary"]["predicted_ms"]
        + (condition["summary"]["predicted_ms"] if trips is None else 0.0)
    )
    summary = data["summary"]
    assert (summary["collectives"], summary["exposed_here_ms"]) == (times, 0.0)
    assert summary["exposed_ms"] == pytest.approx(times * body["summary"]["exposed_ms"])
    assert summary["unscheduled_ms"] == pytest.approx(step["seconds"] * 1e3)
    assert summary["stream_ms"] == {"stride1x2": pytest.approx(times * 2000.0)}
    assert summary["floor_ms"] == pytest.approx(times * 2000.0, rel=1e-2) or trips is None
