"""HLO text to proto, by the parser in jaxlib. It checks syntax and shapes, not what ops mean."""

from __future__ import annotations

import re
from bisect import bisect_left

from jaxlib import _hlo

from stretto.runtime.errors import InvalidProgramError

from .text_elements import spell_out_elements
from .text_groups import spell_out_groups

_POSITION = re.compile(r"was parsing (\d+):(\d+)")
_SILENT = re.compile(r"as a HloModule:\s*\Z")
INSTRUCTION = re.compile(r"^[ \t]*((?:ROOT[ \t]+)?%?([\w.-]+)[ \t]*=.*)$", re.MULTILINE)


def parse_hlo_text(text: str) -> bytes:
    """Serialized ``HloModuleProto`` of HLO text. Raises `InvalidProgramError` with XLA's reason."""
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        older = spell_out_groups(spell_out_elements(text))
        if older != text:
            return parse_hlo_text(older)
        where = _instruction(text, str(error)) or _refused(text, str(error))
        raise InvalidProgramError(f"{where}cannot parse HLO text: {error}") from error


def _instruction(text: str, reason: str) -> str:
    """The name, and a colon, of the instruction in which or right behind which XLA's parser stopped."""
    position = _POSITION.search(reason)
    if position is None:
        return ""
    line, column = int(position[1]), int(position[2])
    offset = sum(len(part) + 1 for part in text.split("\n")[: line - 1]) + column - 1
    begun = [found for found in INSTRUCTION.finditer(text) if found.start(1) < offset]
    return (
        f"in or right behind instruction {begun[-1][2]} ({begun[-1][1].strip()}): " if begun else ""
    )


def _refused(text: str, reason: str) -> str:
    """The instruction that XLA's parser refuses, if the error does not name it: the first one behind which
    the text can be cut off and is refused in the same way."""
    instructions = list(INSTRUCTION.finditer(text))
    if not _SILENT.search(reason) or not instructions:
        return ""

    def refuses(count: int) -> bool:
        try:
            _hlo.hlo_module_from_text(f"{text[: instructions[count].end()]}\n}}")
        except Exception as error:
            return bool(_SILENT.search(str(error)))
        return False

    first = bisect_left(range(len(instructions)), True, key=refuses)
    if first == len(instructions):
        return ""
    line, name = instructions[first].groups()
    hint = "; the channel_id of a -done must be its operand's" if "-done(" in line else ""
    return f"instruction {name} ({line.strip()}) is refused by XLA without a reason{hint}: "
