"""What is said of HLO text that XLA's parser refuses."""

from __future__ import annotations

import pytest

from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.errors import InvalidProgramError

MESSAGES = """HloModule m

sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}

ENTRY e {
  p = f32[8]{0} parameter(0)
  t = token[] after-all()
  s = (f32[8]{0}, u32[], token[]) send(p, t), channel_id=1
  sd = token[] send-done(s)CHANNEL
  r = (f32[8]{0}, u32[], token[]) recv(t), channel_id=1
  rd = (f32[8]{0}, token[]) recv-done(r), channel_id=1
  ROOT o = f32[8]{0} get-tuple-element(rd), index=0
}
"""


@pytest.mark.parametrize("channel", ["", ", channel_id=2"])
def test_what_xla_refuses_without_a_reason_is_found(channel: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        parse_hlo_text(MESSAGES.replace("CHANNEL", channel))
    assert str(caught.value).startswith(
        f"instruction sd (sd = token[] send-done(s){channel}) is refused by XLA without a reason; "
        "the channel_id of a -done must be its operand's: cannot parse"
    )


def test_what_xla_names_is_named() -> None:
    assert parse_hlo_text(MESSAGES.replace("CHANNEL", ", channel_id=1"))
    with pytest.raises(
        InvalidProgramError, match=r"^in or right behind instruction sd \(sd = token"
    ):
        parse_hlo_text(MESSAGES.replace("CHANNEL", ", channel_id=1, colour={}"))
