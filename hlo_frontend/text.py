"""HLO text to proto, by the parser in jaxlib. It checks syntax and shapes, not what ops mean."""

from __future__ import annotations

import re

from jaxlib import _hlo

from stretto.runtime.errors import InvalidProgramError

from .text_elements import spell_out_elements
from .text_groups import spell_out_groups

_POSITION = re.compile(r"was parsing (\d+):(\d+)")
_INSTRUCTION = re.compile(r"^[ \t]*((?:ROOT[ \t]+)?%?([\w.-]+)[ \t]*=.*)$", re.MULTILINE)


def parse_hlo_text(text: str) -> bytes:
    """Serialized ``HloModuleProto`` of HLO text. Raises `InvalidProgramError` with XLA's reason."""
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        older = spell_out_groups(spell_out_elements(text))
        if older != text:
            return parse_hlo_text(older)
        where = _instruction(text, str(error))
        raise InvalidProgramError(f"{where}cannot parse HLO text: {error}") from error


def _instruction(text: str, reason: str) -> str:
    """``name: `` of the instruction that XLA's parser stopped in, or right behind."""
    position = _POSITION.search(reason)
    if position is None:
        return ""
    line, column = int(position[1]), int(position[2])
    offset = sum(len(part) + 1 for part in text.split("\n")[: line - 1]) + column - 1
    begun = [found for found in _INSTRUCTION.finditer(text) if found.start(1) < offset]
    return (
        f"in or right behind instruction {begun[-1][2]} ({begun[-1][1].strip()}): " if begun else ""
    )
