"""HLO's ``topk``, which XLA cannot write as StableHLO: values and indices by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter import Interpreter

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.topk import spell_out_topk

INSIDE = """
first {{
  v = {type}[3,6] parameter(0)
  ROOT t = ({type}[3,2], s32[3,2]) topk(v), k=2, largest={largest}
}}
"""
TEXT = """HloModule m, num_partitions=2
{inside}
ENTRY e {{
  p = {type}[3,6] parameter(0)
  k = ({type}[3,2], s32[3,2]) {made}
  values = {type}[3,2] get-tuple-element(k), index=0
  indices = s32[3,2] get-tuple-element(k), index=1
  moved = {type}[3,2] collective-permute(values), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT r = ({type}[3,2], s32[3,2]) tuple(moved, indices)
}}
"""
DIRECT, CALLED = "topk(p), k=2, largest={largest}", "call(p), to_apply=first"


@pytest.mark.parametrize("made", [DIRECT, CALLED])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("type", "dtype"), [("f32", np.float32), ("s32", np.int32), ("u8", np.uint8)]
)
def test_first_values_and_their_indices(made: str, largest: bool, type: str, dtype: type) -> None:
    spelled = {"type": type, "largest": str(largest).lower()}
    inside = INSIDE.format(**spelled) if made is CALLED else ""
    text = TEXT.format(**spelled, inside=inside, made=made.format(**spelled))
    x = np.random.default_rng(3).integers(0, 4, (2, 3, 6)).astype(dtype)  # many are equal
    wide = x.astype(np.int64)
    expected = np.argsort(-wide if largest else wide, axis=-1, kind="stable")[..., :2]
    values, indices = Interpreter(compile_hlo(text, 1, 2).program).run(list(x))
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1)[::-1])


def test_numbers_that_are_none_come_first() -> None:
    text = TEXT.format(type="f32", largest="true", inside="", made=DIRECT.format(largest="true"))
    x = np.array([[0, np.nan, 3, -np.inf, np.inf, 1]] * 3, np.float32)
    _, indices = Interpreter(compile_hlo(text, 1, 2).program).run([x, x])
    assert indices[0].tolist() == [[1, 4]] * 3


def test_modules_without_it_are_as_they_were() -> None:
    module = parse_hlo_text("HloModule topk\nENTRY e {\n ROOT p = f32[4] parameter(0)\n}\n")
    assert spell_out_topk(module) is module
