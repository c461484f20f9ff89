"""Segments with custom calls, as plugins behind PJRT's C API read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, manual, mesh
from jaxlib.mlir.dialects import stablehlo as dialect

from stretto.hlo_frontend import stablehlo

VERSION = "1.9.0"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["eigh", "qr", "inv"])
def test_custom_calls_can_be_written_as_portable_stablehlo(name: str, platform: str) -> None:
    """Those with several results, and those with layouts, as a plugin that is a year old reads it."""
    function = getattr(jnp.linalg, name)

    def solve(a: jax.Array) -> jax.Array:
        found = function(a)
        first = found if name == "inv" else found[0]
        return jax.lax.psum(first, "x")

    shape = jax.ShapeDtypeStruct((4, 6, 6), np.float32)
    module = compiled(manual(solve, mesh(2), P("x"), P()), shape, num_devices=2, platform=platform)
    calls = 0
    for segment in module.program.segments:
        tree = stablehlo.parse(segment.module)
        found = [o for o in stablehlo.operations(tree) if o.name == "stablehlo.custom_call"]
        calls += len(found)
        assert not [o for o in found if "tuple<" in str(o.results[0].type)]
        with tree.context:
            old = dialect.serialize_portable_artifact(tree, VERSION)
        assert stablehlo.signature(stablehlo.parse(old)).inputs == segment.inputs
    assert calls >= 1
