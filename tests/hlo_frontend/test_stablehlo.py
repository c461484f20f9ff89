"""Modules as MLIR: which context they are parsed in."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter import Interpreter
from jaxlib.mlir import ir

from stretto.hlo_frontend import stablehlo
from stretto.hlo_frontend.compile import CompileSpec, compile_stablehlo
from stretto.runtime.errors import InvalidProgramError

SMALL = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"


def padded(nbytes: int) -> str:
    """The small module in so many bytes of text."""
    return SMALL + " " * (nbytes - len(SMALL))


def contexts(*sizes: int) -> list[ir.Context]:
    """The contexts of modules of these sizes, parsed one after another."""
    found = []
    for nbytes in sizes:
        with stablehlo.parsed(padded(nbytes)) as module:
            found.append(module.context)
    return found


@pytest.fixture
def no_context_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stablehlo, "_idle", [])


@pytest.mark.usefixtures("no_context_is_idle")
def test_modules_use_a_context_one_after_another_until_it_has_seen_its_share() -> None:
    first, second, third, fourth = contexts(400_000, 400_000, 400_000, 1_000)
    assert first is second is third
    assert fourth is not third


@pytest.mark.usefixtures("no_context_is_idle")
def test_modules_at_the_same_time_have_contexts_of_their_own() -> None:
    with stablehlo.parsed(SMALL) as first, stablehlo.parsed(SMALL) as second:
        assert first.context is not second.context
        used = {id(first.context), id(second.context)}
    assert {id(context) for context in contexts(1_000)} <= used


@pytest.mark.usefixtures("no_context_is_idle")
def test_a_context_is_of_use_after_a_module_that_cannot_be_read() -> None:
    (before,) = contexts(1_000)
    with pytest.raises(InvalidProgramError), stablehlo.parsed("func.func @main( {"):
        pass
    (after,) = contexts(1_000)
    assert after is before


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


def test_a_constraint_on_one_device_says_nothing() -> None:
    module = stablehlo.parse("""
        sdy.mesh @empty_mesh = <[]>
        func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
          %0 = sdy.sharding_constraint %x <@empty_mesh, [{}]> : tensor<2xf32>
          %1 = stablehlo.add %0, %0 : tensor<2xf32>
          return %1 : tensor<2xf32>
        }""")
    assert stablehlo.is_local(module)
    text = str(stablehlo.parse(stablehlo.for_engine(module)))
    assert "sdy." not in text
    assert "stablehlo.add %arg0, %arg0" in text


def test_engines_are_not_told_of_kinds_of_memory() -> None:
    module = stablehlo.parse("""
        func.func @main(%x: tensor<2xf32> {mhlo.memory_kind = "pinned_host", tf.aliasing_output = 0 : i32})
            -> (tensor<2xf32> {jax.result_info = "y", mhlo.memory_kind = "pinned_host"}) {
          %0 = stablehlo.add %x, %x : tensor<2xf32>
          return %0 : tensor<2xf32>
        }""")
    text = str(stablehlo.parse(stablehlo.for_engine(module)))
    assert "memory_kind" not in text
    assert "tf.aliasing_output = 0" in text and 'jax.result_info = "y"' in text


MULHI = """
    func.func @main(%x: tensor<4xui32>, %y: tensor<4xui32>) -> tensor<4xui32> {
      %0 = stablehlo.composite "chlo.mulhi" %x, %y {decomposition = @high, version = 1 : i32}
        : (tensor<4xui32>, tensor<4xui32>) -> tensor<4xui32>
      return %0 : tensor<4xui32>
    }
    func.func private @high(%x: tensor<4xui32>, %y: tensor<4xui32>) -> tensor<4xui32> {
      %0 = stablehlo.convert %x : (tensor<4xui32>) -> tensor<4xui64>
      %1 = stablehlo.convert %y : (tensor<4xui32>) -> tensor<4xui64>
      %2 = stablehlo.multiply %0, %1 : tensor<4xui64>
      %c = stablehlo.constant dense<32> : tensor<4xui64>
      %3 = stablehlo.shift_right_logical %2, %c : tensor<4xui64>
      %4 = stablehlo.convert %3 : (tensor<4xui64>) -> tensor<4xui32>
      return %4 : tensor<4xui32>
    }"""


def test_what_hlo_alone_has_an_instruction_for_is_decomposed() -> None:
    program = compile_stablehlo(MULHI, CompileSpec(num_partitions=2)).program
    x = np.array([2**31, 2**32 - 1, 5, 3], np.uint32)
    ((result, _),) = Interpreter(program).run([x, x], [x, x])
    np.testing.assert_array_equal(result, (x.astype(np.uint64) ** 2 >> 32).astype(np.uint32))


def test_a_done_has_what_its_start_gave_without_the_barriers_between() -> None:
    text = """
    func.func public @main(%arg0: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
      %0 = stablehlo.custom_call @"all-reduce-start"(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
      %1 = stablehlo.sine %arg0 : tensor<4xf32>
      %2:2 = stablehlo.optimization_barrier %0, %1 : tensor<4xf32>, tensor<4xf32>
      %3:2 = stablehlo.optimization_barrier %2#1, %2#0 : tensor<4xf32>, tensor<4xf32>
      %4 = stablehlo.custom_call @"all-reduce-done"(%3#1) : (tensor<4xf32>) -> tensor<4xf32>
      return %4, %3#0 : tensor<4xf32>, tensor<4xf32>
    }"""
    with stablehlo.parsed(text) as module:
        assert stablehlo.take_starts_out_of_barriers(module)
        barriers = [
            o for o in stablehlo.operations(module) if o.name == "stablehlo.optimization_barrier"
        ]
        (argument,) = stablehlo.main(module).regions[0].blocks[0].arguments
        # What the start was given is ahead of what follows.
        assert [list(o.operands).index(argument) for o in barriers] == [0, 1]
        (done,) = (
            o for o in stablehlo.operations(module) if "all-reduce-done" in str(o) and not o.regions
        )
        assert "all-reduce-start" in str(done.operands[0].owner)
        assert not stablehlo.take_starts_out_of_barriers(module)
