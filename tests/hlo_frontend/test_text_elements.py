"""Text that reads tuple elements by number, against the same text with the elements spelled out."""

from __future__ import annotations

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.text_elements import spell_out_elements

NEW = """HloModule m

%f (p: (f32[2], (s32[], f32[3]))) -> f32[2] {
  %p = (f32[2]{0}, /*index=1*/(s32[], f32[3]{0})) parameter(0)
  ROOT %n = f32[2]{0} negate(%p#0)
}

ENTRY %main (x: f32[2], i: s32[], z: f32[3]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %i = s32[] parameter(1)
  %z = f32[3]{0} parameter(2)
  %in = (s32[], f32[3]{0}) tuple(%i, %z)
  %t = (f32[2]{0}, (s32[], f32[3]{0})) tuple(%x, %in)
  %c = f32[2]{0} call(%t), to_apply=%f
  ROOT %r = f32[2]{0} add(%c, %t#0)
}
"""


def test_elements_become_instructions() -> None:
    older = spell_out_elements(NEW)
    assert "#" not in older
    module = Module.parse(parse_hlo_text(older))
    add = module.entry.root
    element = add.operands[1]
    assert (element.opcode, element.proto.tuple_index) == ("get-tuple-element", 0)
    assert list(element.shape.dimensions) == [2]
    (inner,) = next(c for c in module.computations if c.name == "f").root.operands
    assert inner.opcode == "get-tuple-element"


def test_every_parser_takes_the_new_form() -> None:
    module = Module.parse(parse_hlo_text(NEW))
    assert module.entry.root.operands[1].opcode == "get-tuple-element"


def test_text_without_elements_is_left_alone() -> None:
    text = spell_out_elements(NEW)
    assert spell_out_elements(text) is text
