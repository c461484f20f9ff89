"""Programs from JAX functions over a mesh of CPU devices, and their results on JAX's CPU backend."""

from __future__ import annotations

import jax
import numpy as np
from interpreter import Interpreter
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_stablehlo
from stretto.runtime.program import Start, instructions

P = PartitionSpec


def mesh(*sizes: int, names: str = "xyz") -> jax.sharding.Mesh:
    count = int(np.prod(sizes))
    return jax.make_mesh(
        sizes,
        tuple(names[: len(sizes)]),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices("cpu")[:count],
    )


def manual(f, over, in_specs, out_specs, **options):
    """``jit(shard_map(f))``."""
    mapped = jax.shard_map(f, mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


def compiled(
    function, *arguments, num_devices: int, platform: str | None = None, overlap=None
) -> CompiledModule:
    """Lower a jitted function, as JAX would for this many devices, and compile it."""
    traced = function.trace(*arguments)
    lowered = traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()
    text = lowered.as_text(debug_info=True)  # with the names of operations, as a plugin gets it
    return compile_stablehlo(text, CompileSpec(1, num_devices), overlap=overlap)


def kinds(module: CompiledModule) -> list[str]:
    """Kinds of the program's collectives, in its order."""
    starts = [i for i in instructions(module.program.body) if isinstance(i, Start)]
    return [str(module.program.collectives[s.collective].kind) for s in starts]


def payload(module: CompiledModule, kind: Kind) -> int:
    """Bytes that a device takes out of an all-gather, or gives to the others of a reduction, in a ring."""
    total = 0
    for c in module.program.collectives:
        if c.kind is kind:
            n = len(c.groups[0])
            times = 2 if kind is Kind.ALL_REDUCE else 1
            large = c.results if kind is Kind.ALL_GATHER else c.operands
            total += sum(times * t.nbytes * (n - 1) // n for t in large)
    return total


def shards(array: np.ndarray, over: jax.sharding.Mesh, spec: PartitionSpec) -> list[np.ndarray]:
    """The array's piece on each logical device."""
    indices = NamedSharding(over, spec).devices_indices_map(array.shape)
    pieces = [array[indices[d]] for d in over.devices.flat]
    return [np.ascontiguousarray(p).reshape(np.shape(p)) for p in pieces]


def judge(function, over, in_specs, *arguments, exact: bool = False, **kwargs) -> Interpreter:
    """Interpret the function's program and compare every shard with JAX's CPU backend."""
    count = over.devices.size
    module = compiled(function, *arguments, num_devices=count, **kwargs)
    return judge_program(module, function, over, in_specs, *arguments, exact=exact)


def judge_program(module, function, over, in_specs, *arguments, exact: bool) -> Interpreter:
    interpreter = Interpreter(module.program)
    specs = in_specs if isinstance(in_specs, tuple) and not isinstance(in_specs, P) else (in_specs,)
    placed = [
        jax.device_put(a, NamedSharding(over, s)) for a, s in zip(arguments, specs, strict=True)
    ]
    given = [shards(np.asarray(a), over, s) for a, s in zip(arguments, specs, strict=True)]
    got = interpreter.run(*given)
    expected = jax.tree.leaves(function(*placed))
    assert len(got) == len(expected)
    for result, reference in zip(got, expected, strict=True):
        by_device = {s.device: np.asarray(s.data) for s in reference.addressable_shards}
        for d, device in enumerate(over.devices.flat):
            same(result[d], by_device[device], exact=exact)
    return interpreter


def same(got: np.ndarray, expected: np.ndarray, *, exact: bool = False) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if exact or got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected)
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    tolerance = 2e-2 if got.dtype.itemsize < 4 else 2e-5
    np.testing.assert_allclose(
        got.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
    )
