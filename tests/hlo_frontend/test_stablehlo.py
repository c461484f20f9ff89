"""Modules as MLIR: which context they are parsed in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from jaxlib.mlir import ir

from stretto.hlo_frontend import stablehlo

SMALL = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"


def padded(nbytes: int) -> str:
    """The small module in so many bytes of text."""
    return SMALL + " " * (nbytes - len(SMALL))


def test_small_modules_of_a_thread_share_a_context():
    stablehlo.parse(padded(1 << 20))  # fills the one before
    first = stablehlo.parse(SMALL)
    second = stablehlo.parse(SMALL)
    assert first.context is second.context
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(stablehlo.parse, SMALL).result().context is not first.context


def test_a_context_that_has_seen_its_share_of_bytes_is_replaced():
    stablehlo.parse(padded(1 << 20))
    first = stablehlo.parse(padded(600_000))
    second = stablehlo.parse(padded(600_000))
    assert first.context is not second.context
    assert stablehlo.parse(SMALL).context is second.context


def test_a_large_module_has_a_context_of_its_own():
    small = stablehlo.parse(SMALL)
    large = stablehlo.parse(padded((1 << 20) + 1))
    assert large.context is not small.context
    assert stablehlo.parse(SMALL).context is not large.context


def calling(when: str) -> ir.Module:
    """A module with a call that is to be inlined at this time, as `jax.jit(inline=…)` marks it."""
    return stablehlo.parse(f"""
        func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {{
          %0 = call @twice(%x) {{mhlo.frontend_attributes = {{inlineable = "{when}", other = "kept"}}}}
            : (tensor<2xf32>) -> tensor<2xf32>
          return %0 : tensor<2xf32>
        }}
        func.func private @twice(%x: tensor<2xf32>) -> tensor<2xf32> {{
          %0 = stablehlo.add %x, %x : tensor<2xf32>
          return %0 : tensor<2xf32>
        }}""")


def test_only_early_inlining_needs_xla():
    assert not stablehlo.is_local(calling("xla_early"))
    assert stablehlo.is_local(calling("xla_late"))
    assert stablehlo.is_local(calling("false"))


@pytest.mark.parametrize(("when", "stays"), [("xla_late", False), ("false", True)])
def test_late_calls_are_not_left_for_modules_of_their_own(when: str, stays: bool):
    module = calling(when)
    stablehlo.inline_late_calls(module)
    assert ("inlineable" in str(module)) is stays
    assert 'other = "kept"' in str(module)
