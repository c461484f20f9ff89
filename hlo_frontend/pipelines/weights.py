"""Moves weights to the devices that need them in the interleaved schedule, and gradients back.

In the written loop a device has consecutive layers, in R chunks: chunk c of stage s has the layers of virtual
stage ``s * R + c``. In the interleaved schedule, slot r of stage s has virtual stage ``r * P + s``. So chunks
change places before the loop, once in each run of the program. If all devices have the arrays from which
weights are taken, and can compute which part each device takes, a device just takes another part. Otherwise R
permutes move the chunks. Gradients are moved back behind the loop.

A backward pass goes through stages and layers in reverse. Stages and slots are numbered here by the layers'
order in arrays, so that both passes have them in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..builder import array_shape
from ..graph import Instruction, leaf_types
from .emit import Builder
from .parts import Pipeline
from .sameness import Class, Sameness

# For each read of the loop's carry in its body, the initial value of the carry.
Inits = dict[Instruction, Instruction]


@dataclass(frozen=True)
class Move:
    """One round: stage s sends its chunk ``gives[s]`` to stage ``to[s]``, and puts the one that it receives
    into slot ``takes[s]``."""

    gives: tuple[int, ...]
    to: tuple[int, ...]
    takes: tuple[int, ...]


def moves(stages: int, chunks: int) -> list[Move]:
    """R rounds in which every stage gives one chunk and takes one.

    Edges from the stage that has a chunk to the one that needs it form a bipartite graph in which every
    vertex has R edges, which is a union of R perfect matchings (König).
    """
    left = {(s, c): (s * chunks + c) % stages for s in range(stages) for c in range(chunks)}
    rounds = []
    for _ in range(chunks):
        taker: dict[int, tuple[int, int]] = {}
        for stage in range(stages):
            _augment(stage, left, taker, set())
        gives, to, takes = [0] * stages, [0] * stages, [0] * stages
        for target, (stage, chunk) in taker.items():
            gives[stage], to[stage] = chunk, target
            takes[target] = (stage * chunks + chunk) // stages
            del left[stage, chunk]
        rounds.append(Move(tuple(gives), tuple(to), tuple(takes)))
    return rounds


def _augment(
    stage: int,
    left: dict[tuple[int, int], int],
    taker: dict[int, tuple[int, int]],
    seen: set[int],
) -> bool:
    for edge, target in sorted(left.items()):
        if edge[0] != stage or target in seen:
            continue
        seen.add(target)
        if target not in taker or _augment(taker[target][0], left, taker, seen):
            taker[target] = edge
            return True
    return False


class Weights:
    """Puts weights into place, before the loop, and their gradients back after it.

    ``moved`` and ``back``: bytes sent by all devices together.

    ``builder`` adds to the entry computation; ``device`` is there its own id.
    """

    def __init__(
        self,
        builder: Builder,
        pipeline: Pipeline,
        chunks: int,
        sameness: Sameness,
        num_devices: int,
    ) -> None:
        self.builder = builder
        self.pipeline = pipeline
        self.chunks = chunks
        self.size = pipeline.layers.count // chunks  # layers of a chunk
        self.sameness = sameness
        self.moved = self.back = 0
        self.taken = 0  # arrays of weights of which devices take other parts, without moving any
        self.device = builder.add("partition-id", array_shape("u32"))
        self.stage_of = np.zeros(num_devices, np.int32)
        for group in pipeline.upwards:
            self.stage_of[list(group)] = range(len(group))
        self._partner: dict[int, tuple[Any, Any]] = {}

    def placed(
        self, wanted: Instruction, inner: Sequence[Instruction], inits: Inits, shape: Any,
        at_entry: Callable[[Instruction], Any] = lambda i: i.proto,
    ) -> Any:  # fmt: skip
        """The weights ``wanted`` of a loop's body in their new places, as an array of this shape.

        ``inner``: the instructions of the body that compute them; ``inits``: the initial values of the
        carries that these read, which ``at_entry`` has in the entry computation.
        """
        classes: dict[Instruction, Class] = {
            read: self.sameness.of(init) for read, init in inits.items()
        }
        for instruction in inner:
            classes[instruction] = self.sameness.step(instruction, classes)
        type = leaf_types(shape, wanted)[0]
        assert type is not None
        if classes[wanted] is Class.ANY:
            env = {read: at_entry(init) for read, init in inits.items()}
            whole = self._clone(wanted, inner, env)
            return self._permuted(self._sized(whole, type), type, self.size, back=False)
        self.taken += 1
        parts = []
        for slot in range(self.chunks):
            partner, start = self._source(slot)
            env = self._as_on(partner, inner, inits)
            whole = self._sized(self._clone(wanted, inner, env), type)
            parts.append(self._chunk(whole, start, type, self.size))
        return self.builder.add("concatenate", shape, parts, dimensions=[0])

    def put_back(self, whole: Any, size: int | None = None) -> Any:
        """The values of the layers' slots behind the loop, in the places that they have in the written
        loop. ``size``: how many rows a slot has, those of its layers if that is None."""
        (type,) = leaf_types(whole.shape, self.pipeline.loop)
        assert type is not None
        return self._permuted(whole, type, size or self.size, back=True)

    def _sized(self, whole: Any, type: TensorType) -> Any:
        if tuple(whole.shape.dimensions) == type.shape:
            return whole
        return self.builder.reshape(whole, type.shape)

    def _clone(
        self, wanted: Instruction, inner: Sequence[Instruction], env: dict[Instruction, Any]
    ) -> Any:
        for instruction in inner:
            if instruction.opcode == "partition-id":
                env.setdefault(instruction, self.device)
        return self.builder.clone([wanted], env)[wanted]

    def _as_on(
        self, partner: Any, inner: Sequence[Instruction], inits: Inits
    ) -> dict[Instruction, Any]:
        """The values of carries on another device, computed from values that are the same on all."""
        entry = self.pipeline.loop.computation
        env: dict[Instruction, Any] = {}
        for instruction in entry.instructions:
            if instruction is self.pipeline.loop:
                break
            if instruction.opcode == "partition-id":
                env[instruction] = partner
            elif self.sameness.of(instruction) is Class.SAME:
                env[instruction] = instruction.proto
        reads = {r: i for r, i in inits.items() if self.sameness.of(i) is not Class.ANY}
        self.builder.clone(reads.values(), env)
        found = {read: env[init] for read, init in reads.items()}
        return found | {i: partner for i in inner if i.opcode == "partition-id"}

    def _source(self, slot: int) -> tuple[Any, Any]:
        """The device that has the chunk of this slot in the written loop, and its first layer there."""
        if slot not in self._partner:
            stages = self.pipeline.stages
            partner = np.zeros(len(self.stage_of), np.int32)
            start = np.zeros(len(self.stage_of), np.int32)
            for group in self.pipeline.upwards:
                for stage, device in enumerate(group):
                    owner, chunk = divmod(slot * stages + stage, self.chunks)
                    partner[device], start[device] = group[owner], chunk * self.size
            b = self.builder
            id = b.add("convert", array_shape("u32"), [b.lookup(partner, [self.device])])
            self._partner[slot] = id, b.lookup(start, [self.device])
        return self._partner[slot]

    def _chunk(self, whole: Any, start: Any, type: TensorType, size: int) -> Any:
        zero = self.builder.constant(0)
        starts = [start] + [zero] * (len(type.shape) - 1)
        return self.builder.dynamic_slice(whole, starts, [size, *type.shape[1:]])

    def _permuted(self, whole: Any, type: TensorType, size: int, *, back: bool) -> Any:
        b = self.builder
        result, zero = whole, b.constant(0)
        chunk = type.nbytes // self.chunks
        for move in moves(self.pipeline.stages, self.chunks):
            there = np.array(move.gives, np.int32)[self.stage_of] * size
            here = np.array(move.takes, np.int32)[self.stage_of] * size
            pairs = [(g[s], g[t]) for g in self.pipeline.upwards for s, t in enumerate(move.to)]
            if back:
                there, here, pairs = here, there, [(t, s) for s, t in pairs]
            part = self._chunk(whole, b.lookup(there, [self.device]), type, size)
            moved = permute(b, part, sorted(pairs))
            sent = chunk * sum(s != t for s, t in pairs)
            self.back += sent * back
            self.moved += sent * (not back)
            starts = [b.lookup(here, [self.device])] + [zero] * (len(type.shape) - 1)
            result = b.update(result, moved, starts)
        return result


def from_first(builder: Builder, value: Any, groups: Iterable[Sequence[int]]) -> Any:
    """What the first partition of each group has, on all of the group."""
    made = builder.add("collective-broadcast", value.shape, [value], channel_id=1)
    for group in groups:
        made.replica_groups.add(replica_ids=group)
    return made


def permute(builder: Builder, value: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    """A collective-permute between partitions."""
    made = builder.add("collective-permute", value.shape, [value], channel_id=1)
    for source, target in pairs:
        made.source_target_pairs.add(source=source, target=target)
    return made
