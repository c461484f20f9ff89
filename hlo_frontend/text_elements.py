"""Rewrites HLO text in which operands are elements of tuples, for older parsers.

From jaxlib 0.12 on, text may say ``%t#1`` for element 1 of tuple ``%t`` where it used to have an instruction
of its own. Here each such element becomes ``%t.element.1 = … get-tuple-element(%t), index=1``, right behind
``%t``. Text without such elements comes back as it is.
"""

from __future__ import annotations

import re

_ELEMENT = re.compile(r"%([\w.-]+)#(\d+)")
_DEFINITION = re.compile(r"^\s*(?:ROOT\s+)?%([\w.-]+) = \(")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPENING, _CLOSING = "([{", ")]}"


def spell_out_elements(text: str) -> str:
    """``text`` with an instruction for each element of a tuple that is read by number."""
    if not _ELEMENT.search(text):
        return text
    blocks = re.split(r"(?m)(?<=^}\n)", text)  # a computation ends with a brace of its own line
    return "".join(_spell_out(block) for block in blocks)


def _spell_out(block: str) -> str:
    wanted: dict[str, set[int]] = {}
    for name, index in _ELEMENT.findall(block):
        wanted.setdefault(name, set()).add(int(index))
    if not wanted:
        return block
    lines: list[str] = []
    for line in _ELEMENT.sub(r"%\1.element.\2", block).split("\n"):
        lines.append(line)
        found = _DEFINITION.match(line)
        if found is None or found[1] not in wanted:
            continue
        name = found[1]
        types = _parts(line[found.end() :])
        lines += [
            f"  %{name}.element.{i} = {types[i]} get-tuple-element(%{name}), index={i}"
            for i in sorted(wanted[name])
            if i < len(types)
        ]
    return "\n".join(lines)


def _parts(text: str) -> list[str]:
    """The types of a tuple whose opening bracket lies right before ``text``."""
    parts, depth, start = [], 0, 0
    text = _COMMENT.sub("", text)
    for position, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            if not depth:
                parts.append(text[start:position].strip())
                break
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    return parts
