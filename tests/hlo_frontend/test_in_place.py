"""What is handed on by a run that a device does not make is not copied: counted in what XLA has compiled.

Values are those that the written conditional has, computed here by hand.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from executed import engine
from random_steps import compiled
from training_steps import Draw, program

from stretto.collectives.types import TensorType
from stretto.hlo_frontend import stablehlo
from stretto.runtime.engines import xla_cpu
from stretto.runtime.engines.in_place import in_place
from stretto.runtime.program import Segment

# A computation of XLA's text, and the copies of arrays in it.
COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*?^}", re.M | re.S)
COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy\(")


def in_schedule(schedule: str) -> tuple[str, int]:
    """What XLA makes of the loop of a step in a schedule, and how many elements a microbatch has. All that is
    kept or summed up has more."""
    d = Draw(microbatches=5, layers=4, rows=16, width=32, loss="squares")
    function, arguments, _, over = program(d)
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    module = compiled(function, arguments, over.devices.size, schedule, interleave=chunks)
    (report,) = module.interleaved
    assert not report.why
    loop = max(module.program.segments, key=lambda s: len(s.donated))
    assert (
        len(loop.donated) >= 7
    )  # three banks, what both last stages gave, sums of two arrays' gradients
    (compiled_loop,) = xla_cpu.create(1).compile(loop).executable.hlo_modules()
    return compiled_loop.to_string(), d.rows * d.width


@pytest.mark.quick("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_what_a_step_keeps_is_updated_in_place(schedule):
    text, most = in_schedule(schedule)
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in COPY.findall(text)]
    assert sizes, "nothing is copied at all, or copies are written otherwise"
    assert max(sizes) <= most
    # In loops over layers, which have no other loops in them, nothing is.
    bodies = set(re.findall(r"body=%([\w.]+)", text))
    inner = [c[0] for c in COMPUTATION.finditer(text) if c[1] in bodies and " while(" not in c[0]]
    assert len(inner) >= 2 and not any(COPY.search(body) for body in inner)


BANK, ONE = "tensor<4xf32>", "tensor<f32>"
PUT = f"""%z = stablehlo.constant dense<0> : tensor<i32>
      %row = stablehlo.broadcast_in_dim %x, dims = [] : ({ONE}) -> tensor<1xf32>
      %new = stablehlo.dynamic_update_slice %a, %row, %z : ({BANK}, tensor<1xf32>, tensor<i32>) -> {BANK}"""
NOUGHT = f"%n = stablehlo.constant dense<0.0> : {ONE}"
# By name: what the first branch computes and gives, and the second one, of arrays a and b and a number x; and
# whether that becomes a loop.
BRANCHES = {
    "put": (PUT, "%x, %new, %b", NOUGHT, "%n, %a, %b", True),
    # It reads the array as it was, beside what it becomes.
    "read": (f"{PUT}\n%s = stablehlo.add %a, %b : {BANK}", "%x, %new, %s", NOUGHT, "%n, %a, %b", True),
    "swapped": ("", "%x, %b, %a", NOUGHT, "%n, %a, %b", True),
    "twice": (f"{PUT}\n%s = stablehlo.add %a, %b : {BANK}", "%x, %new, %s", "", "%x, %a, %a", True),
    "fresh": (PUT, "%x, %new, %b", f"%o = stablehlo.constant dense<1.0> : {BANK}", "%x, %o, %b", False),
    "computed": (PUT, "%x, %new, %b", f"%s = stablehlo.add %a, %b : {BANK}", "%x, %s, %b", False),
}  # fmt: skip


def by_hand(
    name: str, taken: bool, a: np.ndarray, b: np.ndarray, x: np.ndarray
) -> list[np.ndarray]:
    put = np.concatenate([x[None], a[1:]])
    nought, ones = np.zeros_like(x), np.ones_like(a)
    return {
        "put": ([x, put, b], [nought, a, b]),
        "read": ([x, put, a + b], [nought, a, b]),
        "swapped": ([x, b, a], [nought, a, b]),
        "twice": ([x, put, a + b], [x, a, a]),
        "fresh": ([x, put, b], [x, ones, b]),
        "computed": ([x, put, b], [x, a + b, b]),
    }[name][not taken]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_loop_gives_what_the_conditional_gives(name, taken):
    first, given, second, others, is_rewritten = BRANCHES[name]
    types = f"{ONE}, {BANK}, {BANK}"
    text = f"""module @m {{
      func.func public @main(%p: tensor<i1>, %a: {BANK}, %b: {BANK}, %x: {ONE}) -> ({types}) {{
        %r:3 = "stablehlo.if"(%p) ({{
          {first}
          stablehlo.return {given} : {types}
        }}, {{
          {second}
          stablehlo.return {others} : {types}
        }}) : (tensor<i1>) -> ({types})
        return %r#0, %r#1, %r#2 : {types}
      }}
    }}"""
    with stablehlo.parsed(text) as module:
        written = stablehlo.bytecode(module)
    rewritten = in_place(written)
    assert (rewritten != written) == is_rewritten
    assert rewritten == in_place(rewritten)
    a, b = np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)
    x, p = np.array(9.5, np.float32), np.array(taken)
    given_types = [TensorType("pred", ()), *[TensorType("f32", v.shape) for v in (a, b, x)]]
    segment = Segment(
        tuple(given_types), (given_types[3], *given_types[1:3]), written, reproducible=True
    )
    runner = engine()
    inputs = [runner.put(v, t, 0) for v, t in zip((p, a, b, x), given_types, strict=True)]
    found = [runner.host_view(r) for r in runner.compile(segment).run(0, inputs)]
    for own, expected in zip(found, by_hand(name, taken, a, b, x), strict=True):
        np.testing.assert_array_equal(own, expected)
