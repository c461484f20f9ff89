"""Helpers of the programs: meshes, deterministic inputs, placing them, and running under shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIGNED = ("int4", "int8", "int16", "int32")
UNSIGNED = ("uint4", "uint8", "uint16", "uint32")
FLOATS = ("bfloat16", "float16", "float32")
FLOAT8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3",
    "float8_e3m4",
)
WIDE = ("int64", "uint64", "float64", "complex128")
ALL_DTYPES = ("bool", *SIGNED, *UNSIGNED, *FLOATS, *FLOAT8, "complex64", *WIDE)


def np_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def mesh(order: Sequence[int] | None = None, **axes: int) -> Mesh:
    """A mesh of Auto axes ``name=size`` over ``order`` (indices of jax.devices(); default: the first)."""
    size = math.prod(axes.values())
    chosen = order if order is not None else range(size)
    available = jax.devices()
    grid = np.array([available[i] for i in chosen]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def takes_part(m: Mesh) -> bool:
    """Whether this process owns a device of the mesh; only then it may run programs on it."""
    return any(d.process_index == jax.process_index() for d in m.devices.flat)


def small(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Integers so small that sums over eight devices are exact in every dtype (bool: random bits)."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    low, high = (0, 2) if dtype.startswith("uint") else (-1, 2)
    values = rng.integers(low, high, shape)
    if dtype.startswith("complex"):
        return (values + 1j * rng.integers(-1, 2, shape)).astype(dtype)
    return values.astype(np_dtype(dtype))


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Standard normal numbers (complex: both parts), rounded to ``dtype``."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        return (values + 1j * rng.standard_normal(shape)).astype(dtype)
    return values.astype(np_dtype(dtype))


def bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Values from everywhere in the dtype's range, finite, for programs that only move data."""
    if dtype == "bool" or dtype.startswith(("int", "uint")):
        if dtype == "bool":
            return small(shape, dtype, seed)
        info = ml_dtypes.iinfo(np_dtype(dtype))
        rng = np.random.default_rng(seed)
        wide = rng.integers(
            int(info.min), int(info.max), shape, dtype=np.int64 if info.min else np.uint64
        )
        return wide.astype(np_dtype(dtype))
    values = normal(shape, dtype, seed)
    if dtype == "float8_e8m0fnu":
        return np.exp2(np.round(normal(shape, "float32", seed))).astype(np_dtype(dtype))
    return values


def place(m: Mesh, spec: P, value: np.ndarray) -> jax.Array:
    """``value`` (the same in every process) as a global array sharded by ``spec``."""
    return jax.make_array_from_callback(value.shape, NamedSharding(m, spec), lambda i: value[i])


def manual(
    m: Mesh,
    f: Callable[..., Any],
    *arrays: np.ndarray,
    in_specs: Any = None,
    out_specs: Any = None,
    check_vma: bool = True,
) -> Any:
    """``jit(shard_map(f))`` over the mesh; every spec defaults to dimension 0 over all axes."""
    everything = P(m.axis_names)
    ins = tuple(everything for _ in arrays) if in_specs is None else in_specs
    outs = everything if out_specs is None else out_specs
    mapped = jax.shard_map(f, mesh=m, in_specs=ins, out_specs=outs, check_vma=check_vma)
    specs = ins if isinstance(ins, tuple) and not isinstance(ins, P) else (ins,) * len(arrays)
    placed = [place(m, s, a) for s, a in zip(specs, arrays, strict=True)]
    return jax.jit(mapped)(*placed)
