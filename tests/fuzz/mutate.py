"""Mutations of HLO text and of protos. All randomness comes from the generator that is given."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from stretto.hlo_frontend.schema import HloModuleProto

from .corpus import Seed

_NUMBER = re.compile(r"-?\b\d+\b")
_NAME = re.compile(r"\b[A-Za-z_][\w.-]*\b")
_ATTRIBUTE = re.compile(
    r", [\w-]+=(?:\{[^\n]*?\}\}|\{[^\n{}]*\}|\[[^\n]*?\](?:<=\[[\d,]*\])?|[\w.%]+)"
)
_INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    100,
    1000,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**63 - 1,
)
_TYPES = ("f32", "bf16", "f64", "s32", "u8", "pred", "s4", "c64", "token", "f8e4m3fn", "opaque")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_OPCODES = _words(
    "add all-gather all-gather-done all-gather-start all-reduce all-reduce-done "
    "all-reduce-start all-to-all after-all add-dependency bitcast broadcast call "
    "collective-broadcast collective-permute collective-permute-done "
    "collective-permute-start conditional constant convert copy custom-call dot "
    "dynamic-slice dynamic-update-slice fusion get-tuple-element infeed iota map multiply "
    "negate opt-barrier outfeed pad parameter partition-id ragged-all-to-all recv "
    "recv-done reduce reduce-scatter replica-id reshape rng-bit-generator scatter select "
    "send send-done slice sort transpose tuple while async-start async-done domain "
    "collective-reduce"
)


def mutated(seeds: Sequence[Seed], rng: random.Random) -> bytes:
    """One input: a module with one to a few changes, in text or as a proto."""
    seed = rng.choice(seeds)
    times = rng.choice((1, 1, 1, 2, 3, 6))
    if rng.random() < 0.5:
        text = seed.text
        for _ in range(times):
            text = rng.choice(_TEXT)(text, rng, seeds)
        return text.encode(errors="surrogatepass")
    if rng.random() < 0.15:
        data = seed.proto
        for _ in range(times):
            data = _bytes(data, rng)
        return data
    module = HloModuleProto.FromString(seed.proto)
    for _ in range(times):
        with suppress(IndexError):  # what an earlier change has emptied
            rng.choice(_PROTO)(module, rng)
    return bytes(module.SerializeToString())


# Text


def _other_number(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    return _replace(_NUMBER, text, rng, lambda old: str(_integer(int(old), rng)))


def _other_name(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    names = _NAME.findall(text)
    return _replace(_NAME, text, rng, lambda old: rng.choice(names))


def _other_opcode(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    opcode = re.compile(r"(?<= )[a-z][a-z-]+(?=\()")
    return _replace(opcode, text, rng, lambda old: rng.choice(_OPCODES))


def _other_type(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    kind = re.compile(r"\b(?:f32|bf16|s32|u32|pred|token|s8)(?=\[)")
    return _replace(kind, text, rng, lambda old: rng.choice(_TYPES))


def _without_attribute(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    return _replace(_ATTRIBUTE, text, rng, lambda old: "")


def _another_attribute(text: str, rng: random.Random, seeds: Sequence[Seed]) -> str:
    found = _ATTRIBUTE.findall(rng.choice(seeds).text) or [", index=0"]
    return _replace(_ATTRIBUTE, text, rng, lambda old: rng.choice((old, "")) + rng.choice(found))


def _lines(text: str, rng: random.Random, seeds: Sequence[Seed]) -> str:
    lines = text.split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines.insert(at, rng.choice(rng.choice(seeds).text.split("\n")))
    return "\n".join(lines)


def _characters(text: str, rng: random.Random, _: Sequence[Seed]) -> str:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + text[at + rng.randrange(1, 20) :]
        case 2:
            return text[:at] + rng.choice("{}()[]=,%\"'#é\n\t:*-<>0") + text[at:]
        case _:
            return text[:at] + text[at : at + rng.randrange(1, 200)] * 2 + text[at:]


_TEXT: tuple[Callable[[str, random.Random, Sequence[Seed]], str], ...] = (
    _other_number,
    _other_number,
    _other_name,
    _other_name,
    _other_opcode,
    _other_type,
    _without_attribute,
    _another_attribute,
    _lines,
    _characters,
)


def _replace(
    pattern: re.Pattern[str], text: str, rng: random.Random, new: Callable[[str], str]
) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    at = rng.choice(found)
    return text[: at.start()] + new(at[0]) + text[at.end() :]


def _integer(old: int, rng: random.Random) -> int:
    return rng.choice((old + 1, old - 1, -old, old * 2, rng.choice(_INTEGERS)))


# Protos


def _bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(3)
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + rng.randrange(1, 9) :]
        case 2:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case _:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def _any_field(module: Any, rng: random.Random) -> None:
    """Walk down to some field of some message and change it."""
    message = module
    while True:
        fields = message.DESCRIPTOR.fields
        field = rng.choice([f for f, _ in message.ListFields()] if rng.random() < 0.8 else fields)
        value = getattr(message, field.name)
        map_of_strings = hasattr(value, "items")
        if map_of_strings:
            if value and rng.random() < 0.7:
                key = rng.choice(sorted(value))
                value[key] = _string(value[key], rng)
            else:
                value[rng.choice(("_xla_send_recv_validation", "x", ""))] = _string("{{0,1}}", rng)
            return
        if field.is_repeated if hasattr(field, "is_repeated") else field.label == 3:
            if field.message_type is None:
                _change_list(value, field, rng)
                return
            if not value or rng.random() < 0.15:
                _change_messages(value, rng)
                return
            message = rng.choice(value)
        elif field.message_type is not None:
            if rng.random() < 0.1:
                message.ClearField(field.name)
                return
            message = value
        else:
            _set(message, field, rng)
            return
        if not message.ListFields():
            return


def _set(message: Any, field: Any, rng: random.Random) -> None:
    value = getattr(message, field.name)
    if isinstance(value, bool):
        setattr(message, field.name, not value)
    elif isinstance(value, int):
        try:
            setattr(message, field.name, _integer(value, rng))
        except ValueError:
            message.ClearField(field.name)
    elif isinstance(value, str):
        setattr(message, field.name, _string(value, rng))
    elif isinstance(value, bytes):
        setattr(message, field.name, _bytes(value, rng) if value else rng.randbytes(3))


def _string(value: str, rng: random.Random) -> str:
    if value in _OPCODES:
        return rng.choice(_OPCODES)
    if rng.random() < 0.5 and _NUMBER.search(value):
        return _replace(_NUMBER, value, rng, lambda old: str(_integer(int(old), rng)))
    return rng.choice(("", "x", value + value, value[:-1], "{{0,1}", "é", "{}", value))


def _change_list(values: Any, field: Any, rng: random.Random) -> None:
    listed = list(values)
    if listed and rng.random() < 0.3:
        del listed[rng.randrange(len(listed))]
    elif listed and isinstance(listed[0], int) and rng.random() < 0.7:
        at = rng.randrange(len(listed))
        listed[at] = rng.choice((_integer(listed[at], rng), rng.choice(listed)))
    elif listed:
        listed.append(rng.choice(listed))
    try:
        empty = not listed
        values[:] = [rng.choice(_INTEGERS)] if empty and field.cpp_type <= 4 else listed
    except (ValueError, TypeError):
        del values[:]


def _change_messages(values: Any, rng: random.Random) -> None:
    if not values:
        values.add()
        return
    match rng.randrange(3):
        case 0:
            del values[rng.randrange(len(values))]
        case 1:
            values.add().CopyFrom(rng.choice(values))
        case _:
            shuffled = [type(v).FromString(v.SerializeToString()) for v in values]
            rng.shuffle(shuffled)
            del values[:]
            values.extend(shuffled)


def _rewire(module: Any, rng: random.Random) -> None:
    """Another operand, control predecessor, called computation or root for some instruction."""
    computation = rng.choice(module.computations)
    ids = [i.id for i in computation.instructions] or [0]
    if rng.random() < 0.15:
        computation.root_id = rng.choice(ids)
        return
    instruction = rng.choice(computation.instructions)
    lists = [
        instruction.operand_ids,
        instruction.control_predecessor_ids,
        instruction.called_computation_ids,
    ]
    chosen = rng.choice([values for values in lists if values] or lists[:2])
    pool = [c.id for c in module.computations] if chosen is lists[2] else ids
    if chosen and rng.random() < 0.7:
        chosen[rng.randrange(len(chosen))] = rng.choice(pool)
    elif chosen and rng.random() < 0.5:
        del chosen[rng.randrange(len(chosen))]
    else:
        chosen.append(rng.choice(pool))


def _swap_instruction(module: Any, rng: random.Random) -> None:
    """Another opcode, or the body of an instruction from elsewhere, with its own id."""
    instruction = rng.choice(rng.choice(module.computations).instructions)
    if rng.random() < 0.5:
        instruction.opcode = rng.choice(_OPCODES)
        return
    other = rng.choice(rng.choice(module.computations).instructions)
    identity = instruction.id
    instruction.CopyFrom(other)
    instruction.id = identity


def _some_collective(module: Any, rng: random.Random) -> None:
    """Some field of something that communicates or loops."""
    found = [
        i
        for c in module.computations
        for i in c.instructions
        if i.source_target_pairs or i.channel_id or i.opcode in ("while", "conditional", "recv")
    ]
    if not found:
        _any_field(module, rng)
        return
    _any_field(rng.choice(found), rng)


_PROTO: tuple[Callable[[Any, random.Random], None], ...] = (
    _any_field,
    _any_field,
    _some_collective,
    _some_collective,
    _rewire,
    _swap_instruction,
)
