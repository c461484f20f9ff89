"""A first run costs no more than a later one: what compiles, or is loaded on a device, is so in compile()."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.runtime.engines.xla import XlaEngine


def test_nothing_is_compiled_or_loaded_in_the_first_run(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def watched(name: str) -> None:
        original = getattr(XlaEngine, name)

        def call(self: XlaEngine, ordinal: int, *rest: Any) -> Any:
            seen.append((name, ordinal))
            return original(self, ordinal, *rest)

        monkeypatch.setattr(XlaEngine, name, call)

    watched("compile_for")
    watched("load_for")
    used = [devices[i] for i in (3, 1)]
    sharding = NamedSharding(Mesh(np.array(used), ("x",)), P("x"))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
    compiled = jax.jit(lambda x: jnp.tanh(x) * 3).lower(x).compile()
    assert sorted(seen) == [("compile_for", 0), ("load_for", 1), ("load_for", 3)]
    found = compiled(x)
    assert len(seen) == 3
    np.testing.assert_allclose(found, np.tanh(np.arange(8.0)) * 3, rtol=1e-5)
