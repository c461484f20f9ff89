"""Pieces of large collectives give what the whole gives, moved by the communicator of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto.collectives.hierarchy import Hierarchy
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.pieces import pieces
from stretto.collectives.types import TensorType

OWNER = dict.fromkeys(range(4), 0)
GROUPS = ((0, 2), (3, 1))


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


WHOLE = {
    "all-reduce": Collective(
        Kind.ALL_REDUCE, (f32(7, 5),), (f32(7, 5),), GROUPS, reduction=Reduction.SUM
    ),
    "all-gather": Collective(
        Kind.ALL_GATHER, (f32(1, 7, 5),), (f32(1, 14, 5),), GROUPS, dimension=1
    ),
    "reduce-scatter": Collective(
        Kind.REDUCE_SCATTER,
        (f32(14, 5),),
        (f32(7, 5),),
        GROUPS,
        reduction=Reduction.SUM,
        dimension=0,
    ),
    "all-to-all": Collective(Kind.ALL_TO_ALL, (f32(14, 5),), (f32(14, 5),), GROUPS, dimension=0),
    "broadcast": Collective(Kind.BROADCAST, (f32(33),), (f32(33),), GROUPS),
    "permute": Collective(Kind.PERMUTE, (f32(33),), (f32(33),), pairs=((0, 3), (3, 0), (1, 2))),
}


def run(
    collective: Collective, operands: dict[int, list[np.ndarray]]
) -> dict[int, list[np.ndarray]]:
    return Hierarchy(None, 0).bind(collective, OWNER).run(operands)


@pytest.mark.parametrize("name", WHOLE)
def test_pieces_give_the_whole(name: str) -> None:
    whole = WHOLE[name]
    (type,), (result,) = whole.operands, whole.results
    made = np.random.default_rng(0).integers(0, 99, (4, type.size)).astype(np.float32)
    want = run(whole, {i: [made[i].reshape(type.shape)] for i in range(4)})
    cut = pieces(whole, 48)
    assert len(cut) > 2
    got = np.full((4, result.nbytes), 255, np.uint8)
    for piece in cut:
        (given,), (gives,) = piece.collective.operands, piece.collective.results
        assert max(given.nbytes, gives.nbytes) <= 48
        operands = {}
        for i in range(4):
            flat = np.empty(given.nbytes, np.uint8)
            for _, at, to, nbytes in piece.given:
                flat[to : to + nbytes] = made[i].view(np.uint8)[at : at + nbytes]
            operands[i] = [flat.view(np.float32)]
        for i, (array,) in run(piece.collective, operands).items():
            for _, at, to, nbytes in piece.made:
                got[i, at : at + nbytes] = array.view(np.uint8)[to : to + nbytes]
    for i in range(4):
        np.testing.assert_array_equal(got[i].view(np.float32).reshape(result.shape), want[i][0])


def test_what_is_small_or_not_contiguous_stays_whole() -> None:
    gather = WHOLE["all-gather"]
    other = replace(gather, operands=(f32(2, 7, 5),), results=(f32(2, 14, 5),))
    several = replace(WHOLE["all-reduce"], operands=(f32(40), f32(40)), results=(f32(40), f32(40)))
    for whole in (gather, replace(WHOLE["all-reduce"], reducer=0, reduction=None)):
        assert [p.collective for p in pieces(whole, 1 << 20)] == [whole]
    for whole in (other, several, replace(WHOLE["all-reduce"], reducer=0, reduction=None)):
        (piece,) = pieces(whole, 48)
        assert piece.collective == whole
        assert piece.given == tuple((n, 0, 0, t.nbytes) for n, t in enumerate(whole.operands))
