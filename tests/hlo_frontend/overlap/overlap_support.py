"""Modules and cost tables with round numbers, and checks of schedules against the module itself.

One unit of compute is a dot of two f32[8,8] (1024 operations): a second. Two devices, or four in two
groups. A gather to f32[64] moves 128 bytes: a second. Memory traffic is free unless a test says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Instruction, Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.explained import Explained, explained
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.model import Graph, Task
from stretto.hlo_frontend.overlap.replay import Phase, Step
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.values import BlockGraph
from stretto.testing_replay import Replayed, replay_steps

SUM = """
%sum (left: f32[], right: f32[]) -> f32[] {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %total = f32[] add(%left, %right)
}
"""
NEAR = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"
FAR = "channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def table(
    latency_s: float = 0.0, launch_s: float = 0.0, bytes_per_s: float = 1e30, busy: float = 0.0
) -> CostTable:
    links = tuple(Link(stride, 2, latency_s, 128.0, busy) for stride in (1, 2))
    return CostTable(Compute(1024.0, bytes_per_s, launch_s), links)


def module(body: str, before: str = "") -> Module:
    """A module whose entry has these lines; ``SUM`` is there for reductions."""
    return Module.parse(parse_hlo_text(f"HloModule m\n{SUM}{before}\nENTRY %main {{\n{body}\n}}\n"))


def block(of: Module, num_partitions: int = 4) -> BlockGraph:
    return flatten(of.entry, CollectiveReader(1, num_partitions))


def planned(
    of: Module, costs: CostTable, memory_factor: float = 1.1
) -> tuple[Explained, dict[str, Any], Replayed]:
    """The plan, whatever it gains, its JSON, and what the independent replay makes of that."""
    policy = OverlapPolicy(costs, least_gain=-10.0, memory_factor=memory_factor)
    plan = explained(block(of), policy)
    data = to_json(plan)
    replayed = judged(data)
    check_dependencies(of, data["steps"])
    return plan, data, replayed


def judged(data: dict[str, Any]) -> Replayed:
    """What the independent replay makes of an explanation, which must say the same of itself."""
    replayed, summary = replay_steps(data["steps"]), data["summary"]
    assert replayed.seconds * 1e3 == pytest.approx(summary["predicted_ms"], rel=1e-6)
    assert replayed.exposed_seconds * 1e3 == pytest.approx(
        summary["exposed_here_ms"], rel=1e-6, abs=1e-6
    )
    if not any("blocks" in step for step in data["steps"]):
        assert summary["exposed_ms"] == summary["exposed_here_ms"]
        assert replayed.held_seconds * 1e3 == pytest.approx(summary["held_ms"], abs=1e-6)
    assert replayed.peak_bytes == summary["peak_bytes"]
    assert summary["predicted_ms"] >= summary["floor_ms"] * (1 - 1e-9), summary
    assert summary["exposed_ms"] >= summary["exposed_floor_ms"] - 1e-9 * summary["predicted_ms"]
    return replayed


def check_dependencies(of: Module, steps: list[dict[str, Any]]) -> None:
    """Every instruction that a step runs has its operands, through whatever only renames them.

    For modules without loops: names are looked up in the entry computation.
    """
    entry = {i.name: i for i in of.entry.instructions}
    assert all(name in entry for step in steps for name in _names(step))
    assert all(step["name"] in entry for step in steps)
    done: set[str] = set()
    listed = {name for step in steps for name in _names(step)}

    def check(instruction: Instruction, step: dict[str, Any], own: set[str]) -> None:
        for needed in (*instruction.operands, *instruction.control_predecessors):
            if needed.name in own or needed.name in done:
                continue
            assert needed.name not in listed, f"{step['name']} runs before {needed.name}"
            check(needed, step, own)

    for step in steps:
        own = set(_names(step))
        if step["kind"] != "wait":
            for name in own:
                check(entry[name], step, own if step["kind"] == "compute" else set())
        if step["kind"] != "start":
            done |= own


def _names(step: dict[str, Any]) -> list[str]:
    return step["instructions"] if step["kind"] == "compute" else step["members"]


def order(data: dict[str, Any]) -> list[str]:
    """Steps as text: ``start x``, ``wait x``, ``x``."""
    return [
        step["name"] if step["kind"] == "compute" else f"{step['kind']} {step['name']}"
        for step in data["steps"]
    ]


def entry_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in data["collectives"] if name in c["members"])


def chain_of_gathers(count: int) -> str:
    """A dot with each gathered weight and one more, ``count`` times."""
    lines = ["%x0 = f32[8,8] parameter(0)"]
    for i in range(count):
        lines += [
            f"%w{i} = f32[32] parameter({i + 1})",
            f"%g{i} = f32[64] all-gather(%w{i}), {NEAR}, dimensions={{0}}",
            f"%m{i} = f32[8,8] reshape(%g{i})",
            f"%y{i} = f32[8,8] dot(%x{i}, %m{i}), {DOT}",
            f"{'ROOT ' if i == count - 1 else ''}%x{i + 1} = f32[8,8] dot(%y{i}, %y{i}), {DOT}",
        ]
    return "\n".join(lines)


@st.composite
def graphs(draw: st.DrawFn, most: int) -> Graph:
    """Random tasks on compute and two streams, with random edges and a buffer each."""
    count = draw(st.integers(1, most))
    template = build(block(module(chain_of_gathers(1))), table())
    collective = next(t.collective for t in template.tasks if t.is_collective)
    tasks, buffers = [], []
    for index in range(count):
        before = tuple(b for b in range(index) if draw(st.integers(0, 3)) == 0)
        stream = draw(st.integers(-1, 1))
        buffers.append(draw(st.integers(0, 5)))
        tasks.append(
            Task(
                index,
                template.tasks[0].ops,
                seconds=float(draw(st.integers(0, 6))),
                stream=stream,
                collective=collective if stream >= 0 else None,
                before=before,
                reads=before,
                writes=(index,),
            )
        )
    for task in tasks:
        task.after = tuple(t.index for t in tasks if task.index in t.before)
    return Graph(tasks, buffers, [not t.after for t in tasks], ["near", "far"], 0)


def graph_of(*tasks: tuple[int, float, int, list[int]]) -> Graph:
    """Tasks as (stream, seconds, bytes made, needs), stream -1 compute. What nobody reads is a result."""
    gather = f"ROOT %g = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}"
    of = build(block(module(f"%w = f32[32] parameter(0)\n{gather}")), table()).tasks[0]
    made = [
        Task(
            index,
            of.ops,
            seconds=seconds,
            stream=stream,
            collective=of.collective if stream >= 0 else None,
            before=tuple(needs),
            after=tuple(i for i, task in enumerate(tasks) if index in task[3]),
            reads=tuple(needs),
            writes=(index,),
        )
        for index, (stream, seconds, _, needs) in enumerate(tasks)
    ]
    kept = [not task.after for task in made]
    return Graph(made, [task[2] for task in tasks], kept, ["near", "far"], 0)


PHASES = {"s": Phase.START, "w": Phase.WAIT}
LETTERS = {phase: letter for letter, phase in PHASES.items()}


def steps_of(text: str) -> list[Step]:
    """``0 s1 w1`` computes 0, starts 1 and waits for it."""
    return [(int(word.lstrip("sw")), PHASES.get(word[0], Phase.COMPUTE)) for word in text.split()]


def text_of(steps: list[Step]) -> str:
    """The inverse of `steps_of`."""
    return " ".join(LETTERS.get(phase, "") + str(index) for index, phase in steps)


def check(graph: Graph, steps: list[Step]) -> None:
    """Each task once, after all that it needs; each collective waited for once, before its readers."""
    done, started = set(), set()
    for index, phase in steps:
        task = graph.tasks[index]
        if phase is Phase.WAIT:
            assert index in started and index not in done
        else:
            assert index not in started and set(task.before) <= done
            assert task.is_collective == (phase is Phase.START)
            started.add(index)
        if phase is not Phase.START:
            done.add(index)
    assert done == set(range(len(graph.tasks)))


LOOP = """
%cond (q: (s32[], f32[8,8])) -> pred[] {{
  %q = (s32[], f32[8,8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({bound})
  ROOT %t = pred[] compare({compared}), direction={direction}
}}

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %p = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[8,8] get-tuple-element(%p), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  %r = f32[8,8] all-reduce(%y), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}, use_global_device_ids=true, to_apply=%sum
  %d = f32[8,8] dot(%r, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %both = (s32[], f32[8,8]) tuple(%next, %d)
}}
"""  # noqa: E501
CALL = """
%start = s32[] {start}
%x = f32[8,8] parameter(0)
%init = (s32[], f32[8,8]) tuple(%start, %x)
%loop = (s32[], f32[8,8]) while(%init), condition=%cond, body=%body
ROOT %res = f32[8,8] get-tuple-element(%loop), index=1
"""


def loop_module(
    start: str, bound: int, step: int, direction: str, compared: str = "%j, %n"
) -> Module:
    """A loop over (counter, array) with an all-reduce and a dot in its body; ``start`` is the counter's."""
    text = LOOP.format(bound=bound, step=step, direction=direction, compared=compared)
    return module(CALL.format(start=start), text)
