"""What stands in the place of arrays that were not computed, or not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..engines.engine import Engine


class Absent:
    """Arrays for what was not computed: ``content(type)``, made once for each type and device.

    They are shared by all who lack an array of the type: nobody may overwrite them.
    """

    def __init__(self, engine: Engine, content: Callable[[TensorType], np.ndarray]) -> None:
        self._engine = engine
        self._content = content
        self._made: dict[tuple[TensorType, int], Any] = {}

    def array(self, type: TensorType, ordinal: int) -> Any:
        """The engine's array on a local device."""
        key = (type, ordinal)
        if key not in self._made:
            self._made[key] = self._engine.put(self._content(type), type, ordinal)
        return self._made[key]


def zeros(type: TensorType) -> np.ndarray:
    """What stands for an array that nobody has made."""
    return np.zeros(type.shape, type.numpy)
