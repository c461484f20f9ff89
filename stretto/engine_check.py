"""Conformance of an engine: `check_engine` takes a factory and tries everything an executor relies on.

It needs no accelerator knowledge and no JAX program: modules are small StableHLO texts. A failed check
raises ``AssertionError`` naming the promise of `stretto.runtime.engines.engine.Engine` that is not kept.
"""

from __future__ import annotations

import ctypes
import resource
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stretto.collectives.native import TARGET, handler, table_of
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import ELEMENT_TYPES, TensorType
from stretto.hlo_frontend.stablehlo import MLIR_TYPES
from stretto.runtime.engines.engine import (
    CallingEngine,
    CopyingEngine,
    Engine,
    LoadedSegment,
    ReadingEngine,
    RestoringEngine,
    StreamedEngine,
)
from stretto.runtime.errors import CompileError, StrettoError, UnsupportedError
from stretto.runtime.program import CONTEXT, Segment

F32 = TensorType("f32", (16,))
_FREED_WITHIN = 10.0  # seconds
_STRETCHES, _RUNS = 15, 2_000  # the most stretches of so many runs
_GROWTH = 64  # bytes a run that are no leak
_PROC = Path("/proc/self/statm").exists()
# How MLIR calls element types.
_MLIR = {name: mlir for mlir, name in MLIR_TYPES.items()}
_DOUBLE = b"""
module @double {
  func.func public @main(%a: tensor<16xf32>) -> tensor<16xf32> {
    %r = stablehlo.add %a, %a : tensor<16xf32>
    return %r : tensor<16xf32>
  }
}
"""
_SUM_AND_DIFFERENCE = b"""
module @sum_and_difference {
  func.func public @main(%a: tensor<16xf32>, %b: tensor<16xf32>)
      -> (tensor<16xf32>, tensor<16xf32>) {
    %s = stablehlo.add %a, %b : tensor<16xf32>
    %d = stablehlo.subtract %a, %b : tensor<16xf32>
    return %s, %d : tensor<16xf32>, tensor<16xf32>
  }
}
"""
_DONATED = _DOUBLE.replace(
    b"%a: tensor<16xf32>)", b"%a: tensor<16xf32> {tf.aliasing_output = 0 : i32})"
)
# Layers in a loop, beside carries that make it larger: what a chunk of a pipeline's stage is.
_LAYERS = """
module @layers {{
  func.func public @main(%x: tensor<2x6xf32>, %w: tensor<{layers}x6x6xf32>,
      %kept: tensor<{kept}xf32>) -> tensor<2x6xf32> {{
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %count = stablehlo.constant dense<{layers}> : tensor<i32>
    %r:4 = stablehlo.while(%i = %zero, %y = %x, %ws = %w, %k = %kept)
        : tensor<i32>, tensor<2x6xf32>, tensor<{layers}x6x6xf32>, tensor<{kept}xf32>
    cond {{
      %more = stablehlo.compare LT, %i, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      %slice = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 6, 6]
          : (tensor<{layers}x6x6xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x6x6xf32>
      %own = stablehlo.reshape %slice : (tensor<1x6x6xf32>) -> tensor<6x6xf32>
      %product = stablehlo.dot_general %y, %own, contracting_dims = [1] x [0]
          : (tensor<2x6xf32>, tensor<6x6xf32>) -> tensor<2x6xf32>
      %next = stablehlo.tanh %product : tensor<2x6xf32>
      %other = stablehlo.negate %k : tensor<{kept}xf32>
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %next, %ws, %other
          : tensor<i32>, tensor<2x6xf32>, tensor<{layers}x6x6xf32>, tensor<{kept}xf32>
    }}
    %sum = stablehlo.constant dense<0.0> : tensor<f32>
    %all = stablehlo.reduce(%r#3 init: %sum) applies stablehlo.maximum across dimensions = [0]
        : (tensor<{kept}xf32>, tensor<f32>) -> tensor<f32>
    %none = stablehlo.multiply %all, %sum : tensor<f32>
    %spread = stablehlo.broadcast_in_dim %none, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
    %out = stablehlo.add %r#1, %spread : tensor<2x6xf32>
    return %out : tensor<2x6xf32>
  }}
}}
"""
# Every device adds up what all of them have, three times over.
_SUMS = f"""
module @sums {{
  func.func public @main(%context: tensor<4xui64>, %a: tensor<16xf32>) -> tensor<16xf32> {{
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %count = stablehlo.constant dense<3> : tensor<i32>
    %r:4 = stablehlo.while(%i = %zero, %n = %zero, %c = %context, %x = %a)
        : tensor<i32>, tensor<i32>, tensor<4xui64>, tensor<16xf32>
    cond {{
      %more = stablehlo.compare LT, %i, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      %s:2 = stablehlo.custom_call @{TARGET}(%c, %n, %x) {{api_version = 4 : i32,
          has_side_effect = true, backend_config = {{site = 0 : i64}},
          operand_layouts = [dense<0> : tensor<1xindex>, dense<> : tensor<0xindex>,
                             dense<0> : tensor<1xindex>],
          result_layouts = [dense<> : tensor<0xindex>, dense<0> : tensor<1xindex>]}}
          : (tensor<4xui64>, tensor<i32>, tensor<16xf32>) -> (tensor<i32>, tensor<16xf32>)
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %s#0, %c, %s#1 : tensor<i32>, tensor<i32>, tensor<4xui64>, tensor<16xf32>
    }}
    %end = stablehlo.custom_call @{TARGET}(%context, %r#1) {{api_version = 4 : i32,
        has_side_effect = true, backend_config = {{site = -1 : i64}},
        operand_layouts = [dense<0> : tensor<1xindex>, dense<> : tensor<0xindex>],
        result_layouts = [dense<> : tensor<0xindex>]}} : (tensor<4xui64>, tensor<i32>) -> tensor<i32>
    return %r#3 : tensor<16xf32>
  }}
}}
""".encode()
DOUBLE = Segment((F32,), (F32,), _DOUBLE, name="double")
SUM_AND_DIFFERENCE = Segment((F32, F32), (F32, F32), _SUM_AND_DIFFERENCE, name="sum_and_difference")
SAME = Segment(
    (F32,),
    (F32,),
    b"""func.func public @main(%a: tensor<16xf32>) -> tensor<16xf32> {
      return %a : tensor<16xf32>
    }""",
    name="same",
)
# Large enough for XLA not to run it before it returns.
_SQUARE = TensorType("f32", (64, 64))
SLOW = Segment(
    (_SQUARE, _SQUARE, TensorType("s32", ())),
    (_SQUARE,),
    b"""func.func public @main(%a: tensor<64x64xf32>, %b: tensor<64x64xf32>, %n: tensor<i32>)
    -> tensor<64x64xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %x = %a) : tensor<i32>, tensor<64x64xf32>
  cond {
    %less = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %less : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %next = stablehlo.add %i, %one : tensor<i32>
    %y = stablehlo.multiply %x, %b : tensor<64x64xf32>
    stablehlo.return %next, %y : tensor<i32>, tensor<64x64xf32>
  }
  return %r#1 : tensor<64x64xf32>
}""",
    name="slow",
)
SLOW_SECONDS, SLOW_TRIPS = 0.02, 1 << 24
DONATED = Segment((F32,), (F32,), _DONATED, donated=(0,), name="double_donated")


def check_engine(
    factory: Callable[[int], Engine],
    *,
    dtypes: Iterable[str] = tuple(ELEMENT_TYPES),
    computes: bool = True,
) -> list[str]:
    """Check ``factory(2)``; gives the names of the checks made. Raises ``AssertionError``.

    ``dtypes``: the element types that the engine claims. ``computes``: whether segments are really
    computed, and modules that are none refused.
    """
    kept = []
    for name, check in checks_of(factory, dtypes=dtypes, computes=computes).items():
        try:
            check()
        except Unsupported:
            continue
        kept.append(name)
    return kept


class Unsupported(Exception):
    """What a check is about is something that the engine need not have, and has not."""


def checks_of(
    factory: Callable[[int], Engine],
    *,
    dtypes: Iterable[str] = tuple(ELEMENT_TYPES),
    computes: bool = True,
    devices: int = 2,
) -> dict[str, Callable[[], None]]:
    """The checks by their names, of ``factory(devices)``, which is made once. Each raises ``AssertionError``
    where the engine does not keep a promise, and `Unsupported`.
    """
    engine = factory(devices)
    _expect(engine.num_devices == devices, "num_devices is what the factory was asked for")
    table = _table(dtypes, computes)
    return {name: partial(check, engine, factory) for name, check in table.items()}


def names_of(
    *, dtypes: Iterable[str] = tuple(ELEMENT_TYPES), computes: bool = True
) -> tuple[str, ...]:
    """The names of the checks; they are those of every engine."""
    return tuple(_table(dtypes, computes))


_Factory = Callable[[int], Engine]


def _table(dtypes: Iterable[str], computes: bool) -> dict[str, Callable[[Engine, _Factory], None]]:
    checks: dict[str, Callable[[Engine], None]] = {
        "transfers": partial(_transfers, dtypes=dtypes),
        "copies": _copies,
        "memory_stats": _memory_stats,
        "donation": _donation,
    }
    if computes:
        checks |= {
            "runs": _runs,
            "outputs": _outputs,
            "devices": _devices,
            "compile_errors": _compile_errors,
            "run_errors": _run_errors,
            "threads": _threads,
            "growth": _growth,
        }
        checks |= {f"types/{d}": partial(_arithmetic, dtype=d) for d in dtypes if d != "pred"}
        checks |= {"reproducible": _reproducible, "calls": _calls}
    table = {name: _without_factory(check) for name, check in checks.items()}
    return table | ({"restores": _restores} if computes else {})


def _without_factory(check: Callable[[Engine], None]) -> Callable[[Engine, _Factory], None]:
    return lambda engine, factory: check(engine)


def _wants(offered: bool) -> None:
    if not offered:
        raise Unsupported("the engine does not offer it")


def _expect(kept: bool, promise: str) -> None:
    if not kept:
        raise AssertionError(f"the engine does not keep this promise: {promise}")


def _same(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    _expect(
        got.dtype == expected.dtype and got.shape == expected.shape,
        f"{what}: {got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}",
    )
    _expect(got.tobytes() == np.ascontiguousarray(expected).tobytes(), f"{what}: same content")


def _sample(type: TensorType, seed: int = 1) -> np.ndarray:
    """Values that every element type has."""
    small = (np.arange(type.size) * seed % 2).reshape(type.shape)
    return small.astype(np.float32).astype(type.numpy)


def _ramp(start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + 16, dtype=np.float32)


def _transfers(engine: Engine, dtypes: Iterable[str]) -> None:
    for dtype in dtypes:
        for shape in ((), (0,), (5,), (2, 3), (1, 0, 4)):
            type_ = TensorType(dtype, shape)
            for ordinal in range(engine.num_devices):
                host = _sample(type_)
                array = engine.put(host, type_, ordinal)
                view = engine.host_view(array)
                what = f"put, then host_view of {type_} on device {ordinal}"
                _same(view, host, what)
                _expect(view.flags.c_contiguous, f"{what} is C-contiguous")
                _expect(engine.is_ready(array), f"{what}: is_ready after host_view")
    strided = np.arange(32, dtype=np.float32)[::2]
    _same(engine.host_view(engine.put(strided, F32, 0)), strided, "put of a strided array")
    if getattr(engine, "host_memory", False):
        array = engine.put(_ramp(), F32, 0)
        lies_there = ctypes.string_at(engine.pointer(array), F32.nbytes)
        _expect(lies_there == _ramp().tobytes(), "host_memory: the content lies at its pointer")
    if isinstance(engine, CopyingEngine):
        lent = _aligned(32)
        for view in (lent[:16], lent[::2], lent[::-2]):
            lent[:] = np.arange(32)
            wanted = view.copy()
            array = engine.put_copy(view, F32, 0)
            lent[:] = -1
            _same(engine.host_view(array), wanted, "put_copy is done with the host's memory")
    if isinstance(engine, ReadingEngine):
        for dtype in dtypes:
            for shape in ((), (5,), (2, 3)):
                type_ = TensorType(dtype, shape)
                for ordinal in range(engine.num_devices):
                    host = _sample(type_)
                    found = np.zeros_like(host)
                    engine.read_into(engine.put(host, type_, ordinal), found)
                    _same(found, host, f"put, then read_into of {type_} on device {ordinal}")


def _pointer(engine: Engine, array: Any) -> int | None:
    """None where memory of its own has no addresses."""
    try:
        return engine.pointer(array)
    except StrettoError:
        if getattr(engine, "host_memory", False):
            raise
        return None


def _copies(engine: Engine) -> None:
    host = _ramp()
    source = engine.put(host, F32, 0)
    copies = [engine.copy(source, ordinal) for ordinal in range(engine.num_devices)]
    for copied in copies:
        engine.block(copied)
        _expect(
            _pointer(engine, copied) is None
            or _pointer(engine, copied) != _pointer(engine, source),
            "a copy shares no memory with its source",
        )
    engine.delete(source)
    for copied in copies:
        _same(engine.host_view(copied), host, "a copy outlives its source")
    try:
        engine.host_view(source)
    except Exception:  # of whatever class: that it raises is all that the protocol asks
        return
    _expect(False, "host_view of a deleted array raises")


def _memory_stats(engine: Engine) -> None:
    for ordinal in range(engine.num_devices):
        stats = engine.memory_stats(ordinal)
        _expect(
            all(isinstance(v, int) and v >= 0 for v in stats.values()),
            "memory_stats gives counts, or nothing",
        )
        in_use = stats.get("bytes_in_use")
        if in_use is not None:
            engine.block(
                engine.put(np.zeros(1 << 20, np.uint8), TensorType("u8", (1 << 20,)), ordinal)
            )
            # Not at once, where the array's device still has to reach the point at which it may be.
            end = time.monotonic() + _FREED_WITHIN
            while engine.memory_stats(ordinal)["bytes_in_use"] >= in_use + (1 << 20):
                _expect(time.monotonic() < end, "an array that nobody refers to is freed")
                time.sleep(0.001)


def _donation(engine: Engine) -> None:
    segment = engine.compile(DONATED, name=DONATED.name)
    host = _aligned(16)
    host[:] = _ramp()
    (result,) = segment.run(0, [engine.put(host, F32, 0)])
    engine.block(result)
    _same(host, _ramp(), "put shares the host's memory, but a donated input is not written there")


def _aligned(size: int) -> np.ndarray:
    """A float32 array at a multiple of 64 bytes, which an engine may use as it is."""
    raw = np.zeros(4 * size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + 4 * size].view(np.float32)


def _runs(engine: Engine) -> None:
    double = engine.compile(DOUBLE, name="double")
    both = engine.compile(SUM_AND_DIFFERENCE, name="both")
    donated = engine.compile(DONATED, name="donated")
    for ordinal in range(engine.num_devices):
        a, b = _ramp(), _ramp(100.0)
        inputs = [engine.put(a, F32, ordinal), engine.put(b, F32, ordinal)]
        (twice,) = double.run(ordinal, inputs[:1])
        sum_, difference = both.run(ordinal, [twice, inputs[1]])  # twice may be pending
        what = f"a run on device {ordinal}"
        _same(engine.host_view(sum_), 2 * a + b, what)
        _same(engine.host_view(difference), 2 * a - b, what)
        _same(engine.host_view(inputs[0]), a, f"{what} leaves its inputs alone")
        (again,) = donated.run(ordinal, [twice])
        _same(engine.host_view(again), 4 * a, f"{what} with a donated input")
        engine.delete(inputs[1])
        _same(engine.host_view(sum_), 2 * a + b, f"{what} outlives its inputs")
        array = engine.put(a, F32, ordinal)
        for _ in range(10):
            (array,) = donated.run(ordinal, [array])
        _same(engine.host_view(array), 1024 * a, f"a chain of runs on device {ordinal}")


def _outputs(engine: Engine) -> None:
    """An output is there as soon as the engine says so, and is not its input under another name."""
    same = engine.compile(SAME, name="same")
    slow = engine.compile(SLOW, name="slow")
    trips = _trips(engine, slow)
    for ordinal in range(engine.num_devices):
        source = engine.put(_ramp(), F32, ordinal)
        (kept,) = same.run(ordinal, [source])
        engine.block(kept)
        engine.delete(source)
        _same(engine.host_view(kept), _ramp(), "an output outlives the input that it equals")
        (late,) = slow.run(ordinal, _slow_inputs(engine, ordinal, trips))
        while not engine.is_ready(late):
            time.sleep(0)
        early = np.array(engine.host_view(late))
        _same(early, _square(), "an output that is ready has been written")


def _slow_inputs(engine: Engine, ordinal: int, trips: int) -> list[Any]:
    count = engine.put(np.array(trips, np.int32), SLOW.inputs[2], ordinal)
    return [
        engine.put(_square(), _SQUARE, ordinal),
        engine.put(np.ones(_SQUARE.shape, np.float32), _SQUARE, ordinal),
        count,
    ]


def _square() -> np.ndarray:
    return np.arange(_SQUARE.size, dtype=np.float32).reshape(_SQUARE.shape)


def _trips(engine: Engine, slow: LoadedSegment) -> int:
    """Iterations that take this engine long enough to look at what is not ready yet."""
    trips = 1
    while trips < SLOW_TRIPS:
        start = time.monotonic()
        (done,) = slow.run(0, _slow_inputs(engine, 0, trips))
        engine.block(done)
        if time.monotonic() - start > SLOW_SECONDS:
            break
        trips *= 4
    return trips


def _devices(engine: Engine) -> None:
    """Results are on the device that they were asked for; seen by its memory, where that is counted."""
    big = TensorType("u8", (1 << 20,))
    module = DOUBLE.module.replace(b"16xf32", b"1048576xui8")
    loaded = engine.compile(Segment((big,), (big,), module, name="big"))
    for ordinal in range(engine.num_devices):
        source = engine.put(np.ones(big.shape, np.uint8), big, ordinal)
        engine.block(source)
        before = engine.memory_stats(ordinal).get("bytes_in_use")
        if before is None:
            raise Unsupported("memory_stats has no bytes_in_use")
        (result,) = loaded.run(ordinal, [source])
        engine.block(result)
        more = engine.memory_stats(ordinal)["bytes_in_use"] - before
        _expect(more >= 1 << 20, f"what runs on device {ordinal} gives its results there")


def _growth(engine: Engine) -> None:
    """Runs leave nothing behind: neither on the device, where that is counted, nor in this process."""
    double = engine.compile(DOUBLE, name="double")

    def run(times: int) -> tuple[int, int]:
        for n in range(times):
            (array,) = double.run(0, [engine.put(_ramp(), F32, 0)])
            if n % 50 == 49:  # what is under way takes memory, too
                engine.block(array)
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if _PROC else 0
        return engine.memory_stats(0).get("bytes_in_use", 0), pages * resource.getpagesize()

    # What allocators and pools keep grows now and then, and at first; a leak grows all the time.
    states = [run(_RUNS)]
    for stretch in range(_STRETCHES):
        states.append(run(_RUNS))
        grown = np.median(np.diff(np.array(states[-4:]), axis=0), axis=0) / _RUNS
        if stretch >= 2 and max(grown) < _GROWTH:
            return
    for each, where in zip(grown, ("the device's", "the process's"), strict=True):
        _expect(
            each < _GROWTH,
            f"{where} memory does not grow with runs; it did by {each:.0f} bytes each",
        )


def _arithmetic(engine: Engine, dtype: str) -> None:
    """Sums of a type's smallest and largest numbers, exact in it."""
    type_ = TensorType(dtype, (4,))
    kind = type_.numpy
    if dtype.startswith("c"):
        values = np.array([0, 1 + 2j, -3.5, 1e30j]).astype(kind)
    elif dtype[0] in "su":
        info = ml_dtypes.iinfo(kind)
        least, most = int(info.min) // 2, int(info.max) // 2
        values = np.array([0, least, most, most // 2]).astype(kind)
    else:
        half = ml_dtypes.finfo(kind).max / kind.type(2)
        one = kind.type(1)
        values = np.array([one, one / kind.type(2), half, half / kind.type(2)], kind)
    module = DOUBLE.module.replace(b"16xf32", f"4x{_MLIR[dtype]}".encode())
    try:
        loaded = engine.compile(Segment((type_,), (type_,), module, name=f"sum of {dtype}"))
    except (CompileError, UnsupportedError) as error:
        raise Unsupported(str(error)) from error
    wide = values.astype(np.complex128 if dtype.startswith("c") else np.float64)
    exact = wide * 2 if dtype[0] not in "su" else values.astype(object) * 2
    (result,) = loaded.run(0, [engine.put(values, type_, 0)])
    _same(engine.host_view(result), np.asarray(exact).astype(kind), f"sums of {dtype}")


def _compile_errors(engine: Engine) -> None:
    bad = Segment((F32,), (F32,), b"module { this is no StableHLO }", name="nonsense")
    try:
        engine.compile(bad, name="nonsense")
    except CompileError as error:
        _expect("nonsense" in str(error), "CompileError names the segment")
    else:
        _expect(False, "a module that is none raises CompileError")


def _run_errors(engine: Engine) -> None:
    double = engine.compile(DOUBLE, name="double")
    wrong: list[list[Any]] = [[], [engine.put(np.zeros(3, np.float32), TensorType("f32", (3,)), 0)]]
    for inputs in wrong:
        try:
            (result,) = double.run(0, inputs)
            engine.block(result)
        except Exception:  # of whatever class, at once or when the result is waited for
            continue
        _expect(False, f"a run with {len(inputs)} inputs of the wrong kind raises")


def _threads(engine: Engine) -> None:
    double: LoadedSegment = engine.compile(DOUBLE, name="double")
    results: dict[int, np.ndarray] = {}

    def work(ordinal: int) -> None:
        array = engine.put(_ramp(ordinal), F32, ordinal)
        for _ in range(8):
            (array,) = double.run(ordinal, [array])
        results[ordinal] = engine.host_view(array)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(engine.num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ordinal in range(engine.num_devices):
        _expect(ordinal in results, "a segment can be run from several threads")
        _same(results[ordinal], 256 * _ramp(ordinal), "runs from several threads")


def _calls(engine: Engine) -> None:
    """A loop whose compiled code meets the other device, in one run of both, again and again."""
    _wants(isinstance(engine, CallingEngine) and engine.num_devices > 1)
    _wants(not isinstance(engine, StreamedEngine))  # one device of a process, and NCCL
    assert isinstance(engine, CallingEngine)
    engine.register_handler(TARGET, handler())
    add, groups = Reduction.SUM, ((0, 1),)
    sums = Collective(Kind.ALL_REDUCE, (F32,), (F32,), groups=groups, reduction=add, name="sums")
    table = table_of([sums], {0: 0, 1: 1})
    segment = Segment((F32,), (F32,), _SUMS, name="sums", sites=(0,))
    loaded = engine.compile_together(segment, (0, 1), name="sums")
    contexts = [
        engine.put(np.array([table.address, i, i, 0], np.uint64), CONTEXT, i) for i in range(2)
    ]
    for begin in (0.0, 10.0):
        table.begin()
        given = [engine.put(_ramp(begin + i), F32, i) for i in range(2)]
        (results,) = loaded.run_together([contexts, given])
        while not table.wait(1.0):
            pass
        _expect(not table.failure, f"devices that call collectives meet: {table.failure}")
        for array in results:
            expected = 4 * (_ramp(begin) + _ramp(begin + 1))
            _same(engine.host_view(array), expected, "a loop that calls a collective")


def layers(count: int, kept: int, *, reproducible: bool) -> Segment:
    """``count`` layers of ``tanh(x @ w)`` in a loop that carries ``kept`` floats (zeros) besides."""
    x = TensorType("f32", (2, 6))
    inputs = x, TensorType("f32", (count, 6, 6)), TensorType("f32", (kept,))
    module = _LAYERS.format(layers=count, kept=kept).encode()
    return Segment(inputs, (x,), module, name=f"layers{count}", reproducible=reproducible)


def run_layers(engine: Engine, chunks: int, kept: int, *, reproducible: bool = True) -> np.ndarray:
    """Six layers in so many equal loops, one after the other, on device 0."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, 6)).astype(np.float32)
    weights = rng.standard_normal((6, 6, 6)).astype(np.float32)
    segment = layers(6 // chunks, kept, reproducible=reproducible)
    loaded = engine.compile(segment, name=segment.name)
    array = engine.put(x, segment.inputs[0], 0)
    for own in np.split(weights, chunks):
        given = (np.ascontiguousarray(own), np.zeros(kept, np.float32))
        rest = [engine.put(a, t, 0) for a, t in zip(given, segment.inputs[1:], strict=True)]
        (array,) = loaded.run(0, [array, *rest])
    return np.array(engine.host_view(array))


def _reproducible(engine: Engine) -> None:
    _wants(bool(getattr(engine, "reproducible", False)))
    whole = run_layers(engine, 1, 1)
    for chunks, kept in ((1, 4096), (2, 1), (2, 4096), (6, 1)):
        _expect(
            run_layers(engine, chunks, kept).tobytes() == whole.tobytes(),
            "reproducible segments give the same bits in loops of any length and size",
        )


def _restores(engine: Engine, factory: _Factory) -> None:
    """Code that one engine serialized runs on another of its kind."""
    _wants(isinstance(engine, RestoringEngine))
    another = factory(engine.num_devices)
    if not (isinstance(engine, RestoringEngine) and isinstance(another, RestoringEngine)):
        raise AssertionError("the factory gives engines of two kinds")
    _expect(engine.target == another.target, "target is the same for engines of one kind")
    code = engine.serialize(engine.compile(SUM_AND_DIFFERENCE))
    restored = another.restore(code, SUM_AND_DIFFERENCE, name="restored")
    for ordinal in reversed(range(another.num_devices)):
        arrays = [another.put(_ramp(start), F32, ordinal) for start in (0.0, 5.0)]
        total, difference = restored.run(ordinal, arrays)
        _same(another.host_view(total), 2 * _ramp() + 5, "a restored segment computes the same")
        _same(another.host_view(difference), np.full(16, -5, np.float32), "so does it each result")
    _expect(another.serialize(restored) == code, "what was restored is serialized as it was")
    try:
        another.restore(b"no code", SUM_AND_DIFFERENCE, name="restored")
    except CompileError as error:
        _expect("restored" in str(error), "an error of restoring names the segment")
    else:
        raise AssertionError("bytes that are no code are refused")
