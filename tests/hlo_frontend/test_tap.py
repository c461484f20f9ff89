"""The tap: engine-neutral HLO comes out, nobody else's compilations are touched."""

from __future__ import annotations

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, manual, mesh
from interpreter import Interpreter
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jaxlib import _jax, _xla, xla_client

from stretto.hlo_frontend import stablehlo, tap
from stretto.hlo_frontend.compile import CompileSpec, compile_stablehlo
from stretto.hlo_frontend.flatten import RECOMPUTATION
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.schema import HloModuleProtoWithConfig
from stretto.runtime.errors import InvalidProgramError, StrettoError


def text_of(f, *arguments) -> str:
    return f.lower(*arguments).as_text()


def test_private_symbols_are_as_expected():
    """If this fails: see what `tap` uses in the new jaxlib, and adapt that one file."""
    assert "(name: str, stage: int, callback: object) -> None" in (
        _xla.register_xla_transform.__doc__
    )
    assert "(name: str, stage: int" in _xla.clear_xla_transform.__doc__
    assert "num_devices" in inspect.signature(xla_client.make_cpu_client).parameters
    options = xla_client.CompileOptions()
    for name in ("num_replicas", "num_partitions", "device_assignment", "env_option_overrides"):
        assert hasattr(options, name)
    for name in ("use_spmd_partitioning", "use_shardy_partitioner", "device_assignment"):
        assert hasattr(options.executable_build_options, name)
    assert callable(xla_client.CompileOptions.ParseFromString)


def test_hlo_is_not_tied_to_a_cpu():
    over = mesh(4)
    f = manual(
        lambda x: lax.all_to_all(jnp.tanh(x @ x.T) * 2 + 1, "x", 1, 0, tiled=True),
        over,
        P("x"),
        P("x"),
    )
    hlo = tap.optimized_hlo(stablehlo.parse(text_of(f, np.ones((16, 4), jnp.bfloat16))), 1, 4)
    found = {i.opcode for c in Module.parse(hlo).computations for i in c.instructions}
    assert "all-to-all" in found
    assert not found & {"fusion", "convert", "custom-call"}


def test_only_chains_of_tokens_keep_what_leaves_a_barrier_unused():
    over = mesh(4)

    def sum_behind(token):
        def body(x):
            x, _ = lax.optimization_barrier((jnp.sin(x), token))
            return lax.psum(x, "x")

        f = manual(body, over, P("x"), P())
        module = Module.parse(tap.optimized_hlo(stablehlo.parse(text_of(f, np.ones(8))), 1, 4))
        instructions = [i for c in module.computations for i in c.instructions]
        return [len(i.proto.shape.tuple_shapes) for i in instructions if i.opcode == "opt-barrier"]

    assert sum_behind(np.bool_(False)) == [2]
    assert sum_behind(np.float32(0)) == [1]


def test_floats_of_four_bits_are_sent_and_divided_as_they_are():
    """Not as f16, and not multiplied by a quarter, which they do not have."""
    f = manual(
        lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]) / x.dtype.type(4), mesh(2), P("x"), P("x")
    )
    text = text_of(f, np.ones(8, jnp.float4_e2m1fn))
    module = Module.parse(tap.optimized_hlo(stablehlo.parse(text), 1, 2))
    found = {i.opcode for c in module.computations for i in c.instructions}
    assert {"collective-permute", "divide"} <= found
    assert not found & {"convert", "multiply"}


def test_barriers_tell_whether_jax_made_them_to_compute_again():
    """If this fails: see what `jax._src.ad_checkpoint` names the barriers of `jax.checkpoint` now."""
    over = mesh(4)

    def barriers(layer, f):
        def body(x):
            return f(lambda x: layer(jnp.sin(lax.all_gather(x, "x", tiled=True))[:2]).sum())(x)

        lowered = manual(body, over, P("x"), P("x")).lower(np.ones(8, np.float32))
        hlo = tap.optimized_hlo(stablehlo.parse(lowered.as_text(debug_info=True)), 1, 4)
        instructions = [i for c in Module.parse(hlo).computations for i in c.instructions]
        names = [i.proto.metadata.op_name for i in instructions if i.opcode == "opt-barrier"]
        return [name.rsplit("/", 1)[-1] == RECOMPUTATION for name in names]

    def remat2(x):
        with jax.named_scope("remat2"):
            return lax.optimization_barrier(jnp.cos(x))

    def scanned(f):
        layer = jax.checkpoint(lambda x, _: (x * f(x), None))
        return lambda x: lax.scan(layer, x, length=3)[0].sum()

    assert barriers(jnp.tanh, lambda f: jax.grad(jax.checkpoint(f))) == [True]
    assert barriers(jnp.tanh, lambda f: jax.grad(scanned(f))) == [True]
    assert set(barriers(remat2, jax.grad)) == {False}
    assert sorted(set(barriers(remat2, lambda f: jax.grad(jax.checkpoint(f))))) == [False, True]


@pytest.mark.parametrize("text", ["", "garbage", "module {}", "ML\xefR"])
def test_what_is_not_stablehlo(text):
    with pytest.raises(StrettoError):
        compile_stablehlo(text, CompileSpec(1, 2))


def test_unreadable_options():
    text = text_of(jax.jit(lambda x: x + 1), np.ones(4, np.float32))
    with pytest.raises(InvalidProgramError, match="compile options"):
        compile_stablehlo(text, CompileSpec(1, 2, b"\xff\xff\xff"))


def test_other_compilations_pass_by_while_ours_run():
    over = mesh(2)
    text = text_of(manual(lambda x: lax.psum(x, "x"), over, P("x"), P()), np.ones(8, np.float32))
    failures: list[BaseException] = []

    def ours():
        try:
            for _ in range(8):
                program = compile_stablehlo(text, CompileSpec(1, 2)).program
                assert len(program.collectives) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ours) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(8):
        assert jax.jit(lambda x, i=i: x + i)(1.0) == 1.0 + i
    for thread in threads:
        thread.join()
    assert not failures
    assert not tap._waiting
    assert not _xla.clear_xla_transform(tap._HOOK, 0)  # nothing is left behind


def test_names_come_back():
    over = mesh(2)
    f = manual(lambda x: lax.psum(x, "x"), over, P("x"), P())
    parsed = stablehlo.parse(text_of(f, np.ones(8, np.float32)))
    before = str(parsed)
    assert Module.parse(tap.optimized_hlo(parsed, 1, 2)).name.startswith("jit_")
    assert str(parsed) == before


def test_portable_artifacts_are_read():
    text = text_of(jax.jit(lambda x: x * 2), np.ones(4, np.float32))
    artifact = _jax.mlir.serialize_portable_artifact(text, "1.0.0")
    program = compile_stablehlo(artifact, CompileSpec()).program
    assert program.single_segment is not None


def test_shardings_and_entry_layout_are_told():
    over = mesh(4)
    f = jax.jit(
        lambda x: x * 2,
        in_shardings=NamedSharding(over, P("x")),
        out_shardings=NamedSharding(over, P("x")),
    )
    module = compiled(f, np.ones((8, 4), np.float32), num_devices=4)
    told = HloModuleProtoWithConfig.FromString(module.hlo_with_config())
    assert told.hlo_module.spmd_output_sharding
    assert len(told.hlo_module.spmd_parameters_shardings) == 1
    assert list(told.config.entry_computation_layout.parameters[0].dimensions) == [2, 4]
    assert (told.config.replica_count, told.config.num_partitions) == (1, 4)


def test_donation_of_the_caller():
    over = mesh(2)
    f = manual(
        lambda x, y: (x + lax.psum(y, "x"), y * 2), over, (P("x"), P("x")), P("x"), donate_argnums=0
    )
    x = np.ones((8, 512), np.float32)
    program = compiled(f, x, x, num_devices=2).program
    assert program.donated == (0,)
    donated = [s for i in program.body.instructions for s in getattr(i, "donated", ())]
    assert donated == [program.body.parameters[0]]


def test_options_of_the_caller_are_honoured():
    options = xla_client.CompileOptions()
    options.env_option_overrides = [
        ("xla_disable_hlo_passes", "fusion,cse"),
        ("xla_cpu_enable_fast_math", True),
    ]
    build = options.executable_build_options
    build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_output = [True]
    made = tap._options(options.SerializeAsString(), 2, 4, simplify=True)
    overrides = dict(made.env_option_overrides)
    disabled = overrides["xla_disable_hlo_passes"].split(",")
    assert disabled[:2] == ["fusion", "cse"] and set(tap.DISABLED_PASSES) <= set(disabled)
    assert len(disabled) == len(set(disabled))
    assert overrides["xla_cpu_enable_fast_math"] is True
    assert made.executable_build_options.use_shardy_partitioner
    assert list(made.executable_build_options.allow_spmd_sharding_propagation_to_output) == [True]
    assert (made.num_replicas, made.num_partitions) == (2, 4)


def test_one_device_skips_the_tap(monkeypatch):
    def refuse(*_):
        raise AssertionError("the tap was used")

    monkeypatch.setattr(tap, "optimized_hlo", refuse)
    text = text_of(jax.jit(lambda x: x + 1, donate_argnums=0), np.ones(4, np.float32))
    module = compile_stablehlo(text, CompileSpec())
    assert module.program.single_segment is not None
    assert module.program.donated == (0,)
    told = HloModuleProtoWithConfig.FromString(module.hlo_with_config())
    assert told.hlo_module.entry_computation_name


def test_one_device_with_collectives_becomes_a_local_program():
    over = mesh(1)
    f = manual(lambda x: lax.psum(x, "x") + lax.axis_index("x"), over, P("x"), P())
    x = np.arange(4, dtype=np.float32)
    program = compiled(f, x, num_devices=1).program
    np.testing.assert_array_equal(Interpreter(program).run([x])[0][0], x)


def test_tokens_at_the_boundary_are_empty_arrays():
    def f(x):
        io_callback(lambda _: None, None, x[0], ordered=True)
        return x * 2

    program = compiled(jax.jit(f), np.ones(4, np.float32), num_devices=1).program
    assert [str(t) for t in program.inputs] == ["pred[0]", "f32[4]"]
    assert [str(t) for t in program.outputs] == ["pred[0]", "f32[4]"]
    assert program.single_segment is not None
