"""XLA as a partitioner: StableHLO in, optimized, partitioned, engine-neutral HLO out.

A private CPU client of jaxlib with as many devices as the program compiles the module; a hook that
jaxlib offers before scheduling takes the HLO and ends the compilation there, before XLA:CPU looks at
ops it cannot run. CPU-specific rewrites are switched off by name.

The registry of hooks belongs to the whole process. Ours is registered only while a compilation of ours
runs, answers only for modules that carry a name made here, and leaves all others as they are.

This is the one file of the package that uses private symbols of jaxlib beyond MLIR and HLO parsing:
``jaxlib._xla.{register,clear}_xla_transform``, ``jaxlib.xla_client.make_cpu_client``,
``CompileOptions``, ``DeviceAssignment``, ``DeviceList``. ``tests/hlo_frontend/test_tap.py`` pins them.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxlib import _xla, xla_client
from jaxlib.mlir import ir

from stretto.runtime.errors import InvalidProgramError, UnsupportedError

from . import stablehlo
from .schema import PRIMITIVE_CODES, CompileOptionsProto, HloModuleProto

_REPLACER = "async-collective-replacer"
# XLA:CPU passes that would tie the HLO to XLA:CPU, each with what it does.
DISABLED_PASSES: dict[str, str] = {
    _REPLACER: "makes one op of a start and its done",
    "all_to_all_decomposer": "splits array all-to-all into slices and a tuple all-to-all",
    "all-reduce-promotion": "sends bf16 as f32",
    "float-normalization-bf16": "computes bf16 as f32",
    "dot-library-rewriter": "fuses dots for XLA:CPU's libraries",
    "fusion": "CPU fusions",
    "fusion-wrapper": "CPU fusions of single ops",
    "layout-assignment": "chooses layouts for XLA's CPU kernels; here all arrays are row-major",
    "copy-insertion": "copies for buffers that are not assigned here",
    "reshape-decomposer": "turns reshapes into bitcasts and copies",
    "cse_barrier_expander": "drops optimization barriers, which carry order",
    "small-while-loop-hoisting": "puts small loops into computations that are called as one kernel",
}
DISABLED_PASSES |= {
    "change-op-data-type": "computes small integers as wider ones",
    "float-normalization-f16": "computes f16 as f32",
} | {
    f"float-normalization-{name}": "computes small floats as f16"
    for name in PRIMITIVE_CODES
    if name.startswith(("f8", "f4"))
}
# Of programs that start collectives: these change the types in a start and not in what it computes, which XLA
# then refuses.
DISABLED_WITH_STARTS = {
    f"float-normalization-{name}": "computes small integers as wider ones"
    for name in PRIMITIVE_CODES
    if name.startswith(("s4", "u4", "s2", "u2"))
}
_SIMPLIFIER = "algsimp"
_STAGE_PRE_SCHEDULER = 0
_STOP = "stretto has taken the HLO"

_lock = threading.Lock()
# By how a serialized module of a unique name begins: what the hook took.
_waiting: dict[bytes, list[bytes]] = {}
_counter = itertools.count()
_HOOK = "stretto-tap"


@functools.lru_cache(maxsize=4)
def _client(num_devices: int) -> Any:
    return xla_client.make_cpu_client(num_devices=num_devices)


_client_lock = threading.Lock()


def _hook(serialized: bytes) -> bytes | None:
    # Names are field 1, which comes first, and begin with their length: none is the beginning of another.
    taken = next((t for name, t in list(_waiting.items()) if serialized.startswith(name)), None)
    if taken is None:
        return None
    taken.append(serialized)
    raise RuntimeError(_STOP)


def _options(
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    *,
    simplify: bool,
    passes: Iterable[str] = DISABLED_PASSES,
) -> Any:
    """The caller's compile options, for our client, with these passes switched off too."""
    try:
        CompileOptionsProto.FromString(serialized)  # jaxlib takes what it cannot read for defaults
    except Exception as error:
        raise InvalidProgramError(f"cannot read the compile options: {error}") from error
    if serialized:
        options = xla_client.CompileOptions.ParseFromString(serialized)
    else:
        options = xla_client.CompileOptions()
    devices = np.arange(num_replicas * num_partitions).reshape(num_replicas, num_partitions)
    assignment = xla_client.DeviceAssignment.create(devices)
    options.num_replicas = num_replicas
    options.num_partitions = num_partitions
    options.device_assignment = assignment
    options.compile_portable_executable = False
    build = options.executable_build_options
    build.num_replicas = num_replicas
    build.num_partitions = num_partitions
    build.device_assignment = assignment
    if num_partitions > 1 and not build.use_auto_spmd_partitioning:
        build.use_spmd_partitioning = True
    overrides = dict(options.env_option_overrides)
    disabled = [p for p in str(overrides.get("xla_disable_hlo_passes", "")).split(",") if p]
    disabled += [p for p in passes if p not in disabled]
    if not simplify:
        disabled.append(_SIMPLIFIER)
    overrides["xla_disable_hlo_passes"] = ",".join(disabled)
    options.env_option_overrides = list(overrides.items())
    return options


def optimized_hlo(
    module: ir.Module, num_replicas: int, num_partitions: int, options: bytes = b""
) -> bytes:
    """Serialized ``HloModuleProto`` of the program for one device, layouts and all.

    ``module`` is renamed while it compiles; the result carries the name it had. ``options`` is a
    serialized ``CompileOptionsProto``, of which the device assignment plays no part. Raises
    `InvalidProgramError` or `UnsupportedError` with XLA's reason.

    Some releases of XLA cannot partition a collective that a program starts itself, such as one over some of
    a mesh's axes while the others are left to XLA. It is then compiled with one op for a start and its done,
    as XLA's CPU backend compiles it.
    """
    if not stablehlo.starts_collectives(module):
        return _optimized_hlo(module, num_replicas, num_partitions, options, DISABLED_PASSES)
    # Nobody uses what barriers have in the place of starts.
    order = [_SIMPLIFIER] if stablehlo.take_starts_out_of_barriers(module) else []
    passes = [*DISABLED_PASSES, *DISABLED_WITH_STARTS, *order]
    try:
        return _optimized_hlo(module, num_replicas, num_partitions, options, passes)
    except (InvalidProgramError, UnsupportedError):
        passes = [*(p for p in DISABLED_PASSES if p != _REPLACER), *order]
    return _optimized_hlo(module, num_replicas, num_partitions, options, passes)


def _optimized_hlo(
    module: ir.Module, num_replicas: int, num_partitions: int, options: bytes, passes: Iterable[str]
) -> bytes:
    """`optimized_hlo`, without these passes."""
    count = num_replicas * num_partitions
    simplify = stablehlo.can_be_simplified(module)
    compile_options = _options(
        options, num_replicas, num_partitions, simplify=simplify, passes=passes
    )
    if not options:
        compile_options.executable_build_options.use_shardy_partitioner = stablehlo.uses_shardy(
            module
        )
    with _client_lock:
        client = _client(count)
    attributes = module.operation.attributes
    named = "sym_name" in attributes
    own_name = ir.StringAttr(attributes["sym_name"]).value if named else "main"
    unique = f"stretto_tap_{os.getpid()}_{next(_counter)}"
    with module.context:
        attributes["sym_name"] = ir.StringAttr.get(unique)
        try:
            code = stablehlo.bytecode(module)
        finally:
            if named:
                attributes["sym_name"] = ir.StringAttr.get(own_name)
            else:
                del attributes["sym_name"]
    taken: list[bytes] = []
    beginning = HloModuleProto(name=unique).SerializeToString()
    _expect(beginning, taken)
    try:
        devices = xla_client.DeviceList(tuple(client.devices()))
        client.compile_and_load(code, devices, compile_options)
        failure: Exception | None = None
    except Exception as error:
        failure = error
    finally:
        _forget(beginning)
    if taken:
        return HloModuleProto(name=own_name).SerializeToString() + taken[0][len(beginning) :]
    if failure is None:
        raise UnsupportedError("XLA compiled the module without running the hook that takes HLO")
    text = str(failure).replace(unique, own_name)
    kind = UnsupportedError if "UNIMPLEMENTED" in text else InvalidProgramError
    raise kind(f"XLA cannot partition or optimize the program: {text}") from failure


def _expect(beginning: bytes, taken: list[bytes]) -> None:
    with _lock:
        if not _waiting:
            _xla.register_xla_transform(_HOOK, _STAGE_PRE_SCHEDULER, _hook)
        _waiting[beginning] = taken


def _forget(beginning: bytes) -> None:
    with _lock:
        del _waiting[beginning]
        if not _waiting:
            _xla.clear_xla_transform(_HOOK, _STAGE_PRE_SCHEDULER)
