"""What is received where a transfer is left out, in the debug mode."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.poison import PoisonedCommunicator, poison
from stretto.collectives.types import ELEMENT_TYPES, TensorType

F32 = TensorType("f32", (2,))
OWNER = {0: 0, 1: 0, 2: 0}


def bound(kind: Kind):
    operands = () if kind is Kind.RECV else (F32,)
    results = () if kind is Kind.SEND else (F32,)
    collective = Collective(
        kind,
        operands,
        results,
        pairs=((0, 1), (1, 0)),
        channel=1,
        valid_iterations=((0, 1), (1, 0)),
    )
    return COMMUNICATOR.bind(collective, OWNER)


COMMUNICATOR = PoisonedCommunicator(create_communicator(None, 0))
DATA = {i: [np.full(2, i + 1, np.float32)] for i in range(3)}


def test_targets_of_skipped_pairs_have_nan_and_others_what_they_should():
    got = bound(Kind.PERMUTE).run(DATA, frozenset({0}))
    np.testing.assert_array_equal(got[1][0], [np.nan, np.nan])
    np.testing.assert_array_equal(got[0][0], [2, 2])
    np.testing.assert_array_equal(got[2][0], [0, 0])  # nobody ever sends to it


def test_receives():
    send, receive = bound(Kind.SEND), bound(Kind.RECV)
    skip = frozenset({1})
    send.start(DATA, skip).wait()
    got = receive.start({i: [] for i in range(3)}, skip).wait()
    np.testing.assert_array_equal(got[0][0], [np.nan, np.nan])
    np.testing.assert_array_equal(got[1][0], [1, 1])


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_every_type_has_a_poison_that_is_not_zero(dtype):
    array = poison(TensorType(dtype, (3,)))
    assert (array.dtype, array.shape) == (ELEMENT_TYPES[dtype].numpy, (3,))
    assert (array.view(np.uint8) != 0).any()
