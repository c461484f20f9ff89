"""What engine xla:cuda takes on GPUs, with JAX's own CUDA backend beside it where it is installed.

    python benchmarks/gpu.py [RANKS [SIDE]]

Each measurement is a launch of its own, and its row the median of 20, but for copies the best. SIDE (4096) is
that of the matrices, of 64 MiB then; the fake computes smaller ones.

- dispatch: `jit(x + 1)` of 8 floats, awaited, on one device, and how many times JAX's own that is.
- calls: others of that kind beside JAX's, and a transformer's training step of 199 arrays where flax and
  optax are installed; microseconds of each.
- arrays: 64 MiB to a GPU and from it, as `jax.device_put` and NumPy take them, beside JAX's; milliseconds.
- copies: 64 MiB from a GPU and to it in one copy each, and as a collective through the host makes them: in
  its pieces, with an event behind each. Their rate by that of one copy.
- all-reduce: of 64 MiB over RANKS (2) processes, which share a GPU where there are fewer; bytes of one
  by seconds.
- layers: products and an all-reduce of 64 MiB in each of 8, as many products as take as long as the
  all-reduce; what the scheduler gains by hiding one behind the other, by a table of costs that is calibrated
  before. The trace of a run with overlap comes into gpu-report/trace, for `stretto trace`.
- gather: an all-gather of 64 MiB before a product of 8 times as many columns, whole and in parts.
- step: of training over a pipeline of RANKS stages, 16 microbatches of SIDE / 2 x SIDE / 4, as it is written
  and in each schedule: milliseconds, and GiB that a rank had in use at most.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from stretto.conformance import judge

ROOT = Path(__file__).parents[1]
SIDE = int(os.environ.get("BENCH_SIDE", "4096"))
SIZE = 4 * SIDE * SIDE
LIMIT = 90  # seconds of a launch
STAGED = {"STRETTO_NCCL": "0", "STRETTO_CUDA_MPI": "0"}
# Ranks that share a GPU: NCCL allows that from 2.30 on, and takes few of its processors then.
NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}

# Of pipelines, with how many chunks of layers a stage.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1}


def median(function: Callable[[], Any], runs: int = 20) -> float:
    """Seconds of a call whose result is awaited."""
    import jax

    for _ in range(3):
        jax.block_until_ready(function())
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def dispatch() -> str:
    import jax
    import jax.numpy as jnp

    x = jnp.ones(8)
    add = jax.jit(lambda x: x + 1)
    return f"{median(lambda: add(x)) * 1e6:.1f} us"


def calls() -> str:
    """What stands beside `dispatch`, as JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, host = jnp.ones(8), np.ones((1024, 1024), np.float32)
    add = jax.jit(lambda x: x + 1)
    scan = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c * 0.5 + 1, None), x, length=100)[0])
    until = jax.jit(
        lambda x: jax.lax.while_loop(lambda c: (c < 1e6).any(), lambda c: c * 1.5 + 1, x)
    )

    def chain() -> jax.Array:
        y = x
        for _ in range(100):
            y = add(y)
        return y

    found = {
        "one of 100 in a row": median(chain) / 100,
        "eager x * 2 + x": median(lambda: x * 2 + x),
        "scan of 100": median(lambda: scan(x)),
        "loop until data say so": median(lambda: until(x)),
        "4 MiB to the GPU": median(lambda: jax.device_put(host)),
    }
    try:
        step = training_step()
    except ModuleNotFoundError:
        pass
    else:
        found["training step"] = median(step)
        found["one of 10 in a row"] = median(lambda: [step() for _ in range(10)][-1]) / 10
    return json.dumps({name: round(seconds * 1e6, 1) for name, seconds in found.items()})


def training_step() -> Callable[[], Any]:
    """A step of AdamW on four layers, which donates its weights and moments. Gives the loss."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(4):
                y = linen.LayerNorm()(x)
                x += linen.MultiHeadDotProductAttention(num_heads=8)(y, y)
                y = linen.Dense(2048)(linen.LayerNorm()(x))
                x += linen.Dense(512)(linen.gelu(y))
            return linen.Dense(1000)(x)

    model, rule = Model(), optax.adamw(1e-3)
    x, labels = jnp.ones((8, 128, 512)), jnp.zeros((8, 128), jnp.int32)
    weights = model.init(jax.random.key(0), x)
    state = [weights, rule.init(weights)]

    def loss(weights: Any) -> Any:
        scores = model.apply(weights, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def step(weights: Any, moments: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights)
        updates, moments = rule.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run() -> Any:
        state[0], state[1], value = compiled(*state)
        return value

    return run


def copies() -> str:
    """Of the driver alone, without XLA."""
    from stretto.collectives.cuda import COPY, RECORD, cuda
    from stretto.collectives.ops import Collective, Kind, Reduction
    from stretto.collectives.pieces import pieces
    from stretto.collectives.types import TensorType

    driver, library = cuda(), ctypes.CDLL("libcuda.so.1")
    driver.use(0)
    gpu = c_void_p()
    assert library.cuMemAlloc_v2(byref(gpu), c_size_t(SIZE)) == 0
    host, stream = driver.allocate_pinned(SIZE), driver.stream()
    begin, end, mark = driver.event(True), driver.event(True), driver.event()
    type = TensorType("f32", (SIZE // 4,))
    total = Collective(Kind.ALL_REDUCE, (type,), (type,), ((0, 1),), reduction=Reduction.SUM)
    cut = [(at, nbytes) for piece in pieces(total) for _, at, _, nbytes in piece.given]

    def rate(to: int, source: int, spans: list[tuple[int, int]]) -> float:
        calls = [(RECORD, begin, stream)]
        for at, nbytes in spans:
            calls += [(COPY, to + at, source + at, nbytes, stream), (RECORD, mark, stream)]
        best = 0.0
        for _ in range(20):
            driver.enqueue(0, [*calls, (RECORD, end, stream)])
            driver.synchronize(stream)
            best = max(best, SIZE / driver.elapsed(begin, end) / 1e9)
        return best

    found = []
    for what, to, source in (("from", host, gpu.value or 0), ("to", gpu.value or 0, host)):
        whole, parts = rate(to, source, [(0, SIZE)]), rate(to, source, cut)
        found.append(f"{what} it {whole:.1f}, in pieces {parts:.1f} GB/s = {parts / whole:.0%}")
    return "; ".join(found)


def world() -> tuple[Any, Any]:
    """The ranks' devices as a mesh, and a matrix on each."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("i",))
    split = NamedSharding(mesh, PartitionSpec("i"))
    shape = (len(jax.devices()), SIDE, SIDE)
    x = jax.make_array_from_callback(
        shape, split, lambda index: np.full((1, SIDE, SIDE), 1 / SIDE, np.float32)
    )
    return mesh, x


def mapped(function: Callable[..., Any], mesh: Any, outputs: Any) -> Any:
    import jax
    from jax.sharding import PartitionSpec

    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=outputs)
    )


def all_reduce() -> str:
    import jax
    from jax.sharding import PartitionSpec

    mesh, x = world()
    total = mapped(lambda x: jax.lax.psum(x, "i"), mesh, PartitionSpec())
    seconds = median(lambda: total(x))
    return f"{seconds * 1e3:.2f} ms, {SIZE / seconds / 1e9:.1f} GB/s"


def balance() -> str:
    """How many products take as long as an all-reduce."""
    import jax
    from jax.sharding import PartitionSpec

    mesh, x = world()
    total = mapped(lambda x: jax.lax.psum(x, "i"), mesh, PartitionSpec())
    products = mapped(lambda x: (x[0] @ x[0] @ x[0] @ x[0] @ x[0])[None], mesh, PartitionSpec("i"))
    moving, computing = median(lambda: total(x)), median(lambda: products(x)) / 4
    count = min(128, max(1, round(moving / computing)))
    return f"{moving * 1e3:.2f} ms, a product {computing * 1e3:.2f} ms: {count}"


def layers() -> str:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    mesh, x = world()
    count = int(os.environ["PRODUCTS"])

    def stack(x: Any) -> Any:
        sums = []
        for _ in range(8):
            y = x[0]
            for _ in range(count):
                y = y @ x[0]
            x = jnp.tanh(y)[None]
            sums.append(jax.lax.psum(x, "i"))
        return x, sum(sums)

    run = mapped(stack, mesh, (PartitionSpec("i"), PartitionSpec()))
    return f"{median(lambda: run(x)) * 1e3:.2f} ms"


def arrays() -> str:
    """JSON, as that of `calls`."""
    import jax
    import numpy as np

    host = np.ones((SIDE, SIDE), np.float32)
    copy = jax.jit(lambda x: x + 0)
    x, read = jax.device_put(host), []
    for _ in range(10):
        y = copy(x).block_until_ready()  # an array remembers what NumPy was given of it
        began = time.perf_counter()
        np.asarray(y)
        read.append(time.perf_counter() - began)
    found = {"to the GPU": median(lambda: jax.device_put(host)), "from it": statistics.median(read)}
    return json.dumps({name: round(seconds * 1e3, 1) for name, seconds in found.items()})


def gather() -> str:
    import jax
    from chunked_programs import build

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    run = build("gather", "step", 8 * SIDE, mesh, rows=SIDE, width=SIDE)
    return f"{median(run) * 1e3:.2f} ms"


def step() -> str:
    import jax
    from interleave_ranks import program

    chunks, schedule = int(os.environ["CHUNKS"]), os.environ["SCHEDULE"]
    run, _ = program(chunks, 16, 4, SIDE // 2, SIDE // 4, 0.0, True, schedule)
    seconds = median(run, 5)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return f"{seconds * 1e3:.1f} ms, {peak / 2**30:.2f} GiB"


def calibrate() -> str:
    """Measure a table of costs, into the file that COSTS names."""
    from stretto import cli

    cli.main(["bench", "--calibrate", "-o", os.environ["COSTS"]])
    return "done"


WORK = {
    f.__name__: f
    for f in (dispatch, calls, arrays, copies, all_reduce, balance, calibrate, layers, gather, step)
}


def row(name: str, what: str, ranks: int = 1, **variables: str) -> str:
    """Launch a measurement, print its row, and give what it says; empty if it failed."""
    try:
        done = subprocess.run(
            judge.command(judge.Form(name, ranks, 1), [__file__, "measure", what]),
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{name:44} not over after {LIMIT} s", flush=True)
        return ""
    right = done.returncode == 0
    said = (done.stdout if right else done.stderr).strip().splitlines() or ["nothing"]
    print(f"{name:44} {said[-1][:400]}", flush=True)
    if not right:
        print("\n".join(said[-12:]), flush=True)
    return said[-1] if right else ""


def number(said: str) -> float:
    return float(said.partition(" ")[0]) if said else 0.0


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        said = WORK[sys.argv[2]]()
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
            print(said, flush=True)
        return
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if len(sys.argv) > 2:
        os.environ["BENCH_SIDE"] = sys.argv[2]
    stretto = {"STRETTO_ENGINE": os.environ.get("STRETTO_ENGINE", "xla:cuda")}
    stretto["JAX_PLATFORMS"] = "stretto"
    ours = number(row("dispatch, stretto", "dispatch", **stretto))
    jax = number(row("dispatch, JAX's CUDA backend", "dispatch", JAX_PLATFORMS="cuda"))
    if ours and jax:
        print(f"{'dispatch, times that of JAX (3 at most)':44} {ours / jax:.2f}", flush=True)
    for what, unit in (("calls", "us"), ("arrays", "ms")):
        each = [
            row(f"{what}, {whose}, {unit}", what, **settings)
            for whose, settings in (("stretto", stretto), ("JAX", {"JAX_PLATFORMS": "cuda"}))
        ]
        if all(each):
            mine, theirs = map(json.loads, each)
            for name in mine:
                times = mine[name] / theirs[name]
                print(f"{f'{name}, times that of JAX':44} {times:.2f}", flush=True)
    row("copies of a GPU (80% at least)", "copies", **stretto)
    for way, chosen in (("through the host", STAGED), ("NCCL", NCCL)):
        row(f"all-reduce, {way}", "all_reduce", ranks, **stretto, **chosen)
        balanced = row(f"an all-reduce in products, {way}", "balance", ranks, **stretto, **chosen)
        if not balanced:
            continue
        costs = ROOT / "gpu-report" / f"costs-{way.split()[-1]}.json"
        costs.parent.mkdir(exist_ok=True)
        row(f"calibrated, {way}", "calibrate", ranks, **stretto, **chosen, COSTS=str(costs))
        print(costs.read_text() if costs.exists() else "no table of costs", flush=True)
        settings = stretto | chosen | {"PRODUCTS": balanced.split()[-1]}
        settings["STRETTO_COSTS"] = str(costs)
        trace = str(ROOT / "gpu-report" / "trace" / way.split()[-1])
        hidden = number(row(f"layers, overlap, {way}", "layers", ranks, **settings))
        bare = row(f"layers, no overlap, {way}", "layers", ranks, **settings, STRETTO_OVERLAP="0")
        if hidden and bare:
            faster = number(bare) / hidden
            print(f"{f'layers, times as fast, {way} (1.6 at least)':44} {faster:.2f}", flush=True)
        row(f"layers, overlap, traced, {way}", "layers", ranks, **settings, STRETTO_TRACE=trace)
        if way == "NCCL":
            continue
        whole = row(f"gather and product, {way}", "gather", ranks, **settings)
        parts = number(
            row(f"the same in parts, {way}", "gather", ranks, **settings, STRETTO_SPLIT="1")
        )
        if whole and parts:
            print(f"{f'in parts, times as fast, {way}':44} {number(whole) / parts:.2f}", flush=True)
        for schedule, chunks in SCHEDULES.items():
            asked = {"SCHEDULE": schedule, "CHUNKS": str(chunks)}
            row(f"step, {schedule}, {way}", "step", ranks, **settings, **asked)


if __name__ == "__main__":
    main()
