"""The schedule of a `Program`: what it will communicate, in the order in which the executor walks it.

`walked` is what certificates are made of: it holds the stream of every collective beside what it is, in the
order of their starts; a receive counts where it is waited for, since that is where a device stops.
Collectives that a segment calls are listed one by one, and told apart from others.
`strict` is the same as a `Schedule`, each entry after the one before it: for programs that come without a
schedule of their own, which knows how much of the order data and tokens require.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

from stretto.collectives.ops import Kind
from stretto.collectives.order import Entry, Schedule, certificate, entry_of

from . import Block, Branch, Loop, Program, Run, Start, Wait


def strict(program: Program) -> Schedule:
    """The schedule with the program's own order as the only one possible."""
    return _schedule(program, program.body, streams=False)


def walked(program: Program) -> bytes:
    """A digest (32 bytes) of what is communicated, in which order and on which streams."""
    return certificate(_schedule(program, program.body, streams=True))


def starts(program: Program) -> Iterator[tuple[Entry, int]]:
    """Every collective that is started, as an entry, and its stream: in the order of the program's text."""
    yield from _starts(program, program.body)


def _starts(program: Program, block: Block) -> Iterator[tuple[Entry, int]]:
    for instruction in block.instructions:
        if isinstance(instruction, Start):
            yield _entry(program, instruction), instruction.stream
        for inner in _inner(instruction):
            yield from _starts(program, inner)


def _inner(instruction: object) -> tuple[Block, ...]:
    if isinstance(instruction, Loop):
        # The condition of a loop with a known trip count is never evaluated.
        known = instruction.trip_count is not None
        return (instruction.body,) if known else (instruction.condition, instruction.body)
    return instruction.branches if isinstance(instruction, Branch) else ()


def _schedule(program: Program, block: Block, streams: bool) -> Schedule:
    pending: dict[int, Start] = {}
    entries: list[Entry] = []
    for instruction in block.instructions:
        after = (len(entries) - 1,) if entries else ()
        if isinstance(instruction, Wait):
            receive = pending.pop(instruction.event, None)
            if receive is not None:
                entries.append(_entry(program, receive, after, streams))
        elif isinstance(instruction, Start):
            if program.collectives[instruction.collective].kind is Kind.RECV:
                pending[instruction.event] = instruction
            else:
                entries.append(_entry(program, instruction, after, streams))
        elif isinstance(instruction, Run):
            for site in program.segments[instruction.segment].sites:
                after = (len(entries) - 1,) if entries else ()
                entry = _collective(program, site, after, streams)
                entries.append(replace(entry, key=f"{entry.key} called") if streams else entry)
        elif isinstance(instruction, Loop | Branch):
            children = tuple(_schedule(program, b, streams) for b in _inner(instruction))
            if any(children):
                is_loop = isinstance(instruction, Loop)
                entries.append(
                    Entry(
                        kind="loop" if is_loop else "branch",
                        key="",
                        after=after,
                        children=children,
                        trip_count=instruction.trip_count
                        if isinstance(instruction, Loop)
                        else None,
                        name=instruction.name,
                        source=instruction.source,
                    )
                )
    return Schedule(tuple(entries))


def _entry(
    program: Program, start: Start, after: tuple[int, ...] = (), streams: bool = False
) -> Entry:
    entry = _collective(program, start.collective, after, streams)
    if not streams:
        return entry
    return Entry(entry.kind, f"{entry.key} stream={start.stream}", entry.groups, after)


def _collective(program: Program, index: int, after: tuple[int, ...], streams: bool) -> Entry:
    collective = program.collectives[index]
    reducer = ""
    if collective.reducer is not None:
        reducer = "own"
        if not streams:
            reducer = sha256(program.segments[collective.reducer].module).hexdigest()[:16]
    return entry_of(collective, after, reducer)
