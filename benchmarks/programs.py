"""Small programs of several kinds on 8 devices of one process: stretto and JAX's CPU backend in turns.

Lattices, particles, filters, solvers, attention, routing, graphs, decoding, training: written with JAX alone,
with `jit` over sharded arrays or `shard_map`, most with a loop of small steps. The first run includes tracing
and compiling, once for each platform in one process; later ones are medians. Both must give the same sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import PLATFORMS, on_both_platforms, options, platforms_in_turns, show
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8
TOLERANCE = 1e-3  # of sums of absolute values


class Programs:
    """Each public method makes a program and its arguments, and gives what runs it."""

    def __init__(self, platform: str) -> None:
        self.mesh = Mesh(np.array(jax.devices(platform)[:DEVICES]), ("x",))
        self.random = np.random.default_rng(0)

    def _put(self, array: np.ndarray, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, P(*spec)))

    def _normal(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)

    def ising(self) -> Callable[[], Any]:
        """50 sweeps of a 64 x 64 lattice whose rows are rolled."""
        spins = self._put(np.where(self.random.random((64, 64)) < 0.5, 1, -1).astype(np.int32), "x")
        colour = (np.arange(64)[:, None] + np.arange(64)) % 2

        def half(s: jax.Array, key: jax.Array, which: int) -> jax.Array:
            around = sum(jnp.roll(s, shift, axis) for shift in (1, -1) for axis in (0, 1))
            flips = jax.random.uniform(key, s.shape) < jnp.exp(-0.8 * s * around)
            return jnp.where(flips & (colour == which), -s, s)

        @jax.jit
        def run(spins: jax.Array) -> jax.Array:
            def sweep(s: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
                one, two = jax.random.split(key)
                return half(half(s, one, 0), two, 1), s.mean()

            return lax.scan(sweep, spins, jax.random.split(jax.random.key(0), 50))[1]

        return lambda: run(spins)

    def jacobi(self) -> Callable[[], Any]:
        """200 steps in a loop."""
        grid = self._put(self._normal(128, 128), "x")
        run = jax.jit(lambda u: lax.fori_loop(0, 200, lambda _, u: self._smoothed(u), u))
        return lambda: run(grid)

    def jacobi_called_from_python(self) -> Callable[[], Any]:
        """30 calls of one step."""
        grid, step = self._put(self._normal(128, 128), "x"), jax.jit(self._smoothed)

        def run() -> jax.Array:
            u = grid
            for _ in range(30):
                u = step(u)
            return u

        return run

    @staticmethod
    def _smoothed(u: jax.Array) -> jax.Array:
        return 0.25 * sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1))

    def particles(self) -> Callable[[], Any]:
        """64 bodies that attract each other, 30 steps."""
        places = self._put(self._normal(64, 3), "x")

        def force(p: jax.Array) -> jax.Array:
            apart = p[:, None] - p
            return -(apart / (1 + (apart**2).sum(-1, keepdims=True))).sum(1)

        @jax.jit
        def run(places: jax.Array) -> jax.Array:
            def step(state: Any, _: None) -> tuple[Any, jax.Array]:
                p, v = state
                v = v + 0.01 * force(p)
                return (p + 0.01 * v, v), (v**2).sum()

            return lax.scan(step, (places, jnp.zeros_like(places)), None, length=30)[1]

        return lambda: run(places)

    def kalman_filters(self) -> Callable[[], Any]:
        """64 filters of 50 steps."""
        seen, look = self._put(self._normal(64, 50, 2), "x"), self._normal(2, 4)

        def filtered(seen: jax.Array) -> jax.Array:
            def step(state: Any, y: jax.Array) -> tuple[Any, jax.Array]:
                mean, spread = 0.95 * state[0], 0.9 * state[1] + 0.1 * jnp.eye(4)
                sure = look @ spread @ look.T + jnp.eye(2)
                gain = jnp.linalg.solve(sure, look @ spread).T
                mean = mean + gain @ (y - look @ mean)
                return (mean, spread - gain @ look @ spread), mean

            return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), seen)[1]

        run = jax.jit(jax.vmap(filtered))
        return lambda: run(seen)

    def solves_in_a_loop(self) -> Callable[[], Any]:
        """20 times 64 systems of 16 unknowns."""
        matrices = self._put(self._normal(64, 16, 16) + 8 * np.eye(16, dtype=np.float32), "x")
        right = self._put(self._normal(64, 16), "x")

        def solved(_: Any, x: jax.Array) -> jax.Array:
            return jnp.linalg.solve(matrices, x[..., None])[..., 0] * 8

        run = jax.jit(lambda x: lax.fori_loop(0, 20, solved, x))
        return lambda: run(right)

    def ring_attention_gradient(self) -> Callable[[], Any]:
        """Keys and values go round; three gradients."""
        arrays = [self._put(self._normal(2, 256, 32), None, "x") for _ in range(3)]
        pairs = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]

        def ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            def step(_: Any, state: Any) -> Any:
                k, v, top, total, out = state
                scores = jnp.einsum("bqd,bkd->bqk", q, k)
                higher = jnp.maximum(top, scores.max(-1))
                weights, old = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
                total = total * old + weights.sum(-1)
                out = out * old[..., None] + jnp.einsum("bqk,bkd->bqd", weights, v)
                k, v = (lax.ppermute(a, "x", pairs) for a in (k, v))
                return k, v, higher, total, out

            zero = q[..., 0] * 0
            *_, total, out = lax.fori_loop(0, DEVICES, step, (k, v, zero - 1e30, zero, q * 0))
            return out / total[..., None]

        spec = P(None, "x")
        whole = jax.shard_map(ring, mesh=self.mesh, in_specs=spec, out_specs=spec)
        run = jax.jit(jax.grad(lambda *a: (whole(*a) ** 2).sum(), argnums=(0, 1, 2)))
        return lambda: run(*arrays)

    def sinkhorn(self) -> Callable[[], Any]:
        """Until nothing changes any more, of 256 x 256 costs."""
        costs = self._put(self.random.random((256, 256)).astype(np.float32), "x")

        @jax.jit
        def run(costs: jax.Array) -> jax.Array:
            kernel = jnp.exp(-costs / 0.1)

            def step(state: Any) -> Any:
                count, v, _ = state
                new = 1 / (kernel.T @ (1 / (kernel @ v)))
                return count + 1, new, jnp.abs(new - v).max()

            return lax.while_loop(
                lambda s: (s[0] < 100) & (s[2] > 1e-6), step, (0, jnp.ones(256), jnp.inf)
            )[1]

        return lambda: run(costs)

    def k_means(self) -> Callable[[], Any]:
        """16 means of 4,096 points, 40 rounds."""
        points = self._put(self._normal(4096, 8), "x")

        @jax.jit
        def run(points: jax.Array) -> jax.Array:
            def step(_: Any, means: jax.Array) -> jax.Array:
                nearest = jnp.argmin(((points[:, None] - means) ** 2).sum(-1), 1)
                belongs = jax.nn.one_hot(nearest, 16)
                return (belongs.T @ points) / (belongs.sum(0)[:, None] + 1e-6)

            return lax.fori_loop(0, 40, step, points[:16])

        return lambda: run(points)

    def messages_on_a_graph(self) -> Callable[[], Any]:
        """10 rounds over 4,096 edges of 512 nodes."""
        nodes, weights = (
            self._put(self._normal(512, 16), "x"),
            self._put(self._normal(16, 16) * 0.2),
        )
        sources, targets = (
            self._put(self.random.integers(0, 512, 4096).astype(np.int32), "x") for _ in range(2)
        )

        def step(_: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(jax.ops.segment_sum(x[sources], targets, 512) @ weights)

        run = jax.jit(lambda x: lax.fori_loop(0, 10, step, x))
        return lambda: run(nodes)

    def associative_scan(self) -> Callable[[], Any]:
        """A linear recurrence over a sharded dimension of 1,024."""
        inputs = self._put(self.random.random((1024, 16)).astype(np.float32), "x")

        def joined(p: Any, q: Any) -> Any:
            return p[0] * q[0], q[0] * p[1] + q[1]

        run = jax.jit(lambda a: lax.associative_scan(joined, (a * 0.9, a))[1])
        return lambda: run(inputs)

    def experts(self) -> Callable[[], Any]:
        """6 layers of tokens to experts and back."""
        tokens, choice = self._put(self._normal(256, 32), "x"), self._put(self._normal(32, DEVICES))
        weights = self._put(self._normal(DEVICES, 32, 32) * 0.1, "x")

        def layer(x: jax.Array, w: jax.Array, choice: jax.Array) -> jax.Array:
            expert, room = jnp.argmax(x @ choice, -1), 16
            chosen = jax.nn.one_hot(expert, DEVICES)
            place = (jnp.cumsum(chosen, 0) * chosen - 1).max(-1).astype(int)
            sent = jnp.zeros((DEVICES, room, 32)).at[expert, place].add(x, mode="drop")
            came = lax.all_to_all(sent, "x", 0, 0, tiled=True)
            done = jnp.tanh(came.reshape(-1, 32) @ w[0]).reshape(came.shape)
            back = lax.all_to_all(done, "x", 0, 0, tiled=True)
            return x + back.at[expert, place].get(mode="fill", fill_value=0)

        def layers(x: jax.Array, w: jax.Array, choice: jax.Array) -> jax.Array:
            return lax.fori_loop(0, 6, lambda _, x: layer(x, w, choice), x)

        specs = P("x"), P("x"), P()
        run = jax.jit(jax.shard_map(layers, mesh=self.mesh, in_specs=specs, out_specs=P("x")))
        return lambda: run(tokens, weights, choice)

    def decoding(self) -> Callable[[], Any]:
        """24 tokens of 2 layers, tensor parallel; a cache that is donated, a call for each token."""
        size, batch, length, heads = 64, 4, 32, 8
        split, joined = (None, "x"), ("x",)
        layers = [
            [
                self._put(self._normal(*shape) * 0.1, *spec)
                for shape, spec in (
                    ((size, 3 * size), split),
                    ((size, size), joined),
                    ((size, 4 * size), split),
                    ((4 * size, size), joined),
                )
            ]
            for _ in range(2)
        ]
        words = self._put(self._normal(256, size))
        empty = np.zeros((batch, length, 2, size), np.float32)

        @partial(jax.jit, donate_argnums=1)
        def step(layers: Any, caches: Any, token: jax.Array, at: int) -> Any:
            x, kept = words[token], []
            for (qkv, out, up, down), cache in zip(layers, caches, strict=True):
                q, k, v = jnp.split(x @ qkv, 3, -1)
                new = jnp.stack([k, v], 1)[:, None]
                kept.append(lax.dynamic_update_slice(cache, new, (0, at, 0, 0)))
                keys, values = (kept[-1][:, :, i].reshape(batch, length, heads, -1) for i in (0, 1))
                scores = jnp.einsum("bhd,bthd->bht", q.reshape(batch, heads, -1), keys)
                weights = jax.nn.softmax(jnp.where(jnp.arange(length) <= at, scores, -1e9))
                seen = jnp.einsum("bht,bthd->bhd", weights, values).reshape(batch, size)
                x = x + seen @ out
                x = x + jax.nn.gelu(x @ up) @ down
            return kept, jnp.argmax(x @ words.T, -1)

        def run() -> Any:
            caches = [self._put(empty, None, None, None, "x") for _ in layers]
            token = self._put(np.zeros(batch, np.int32))
            for at in range(24):
                caches, token = step(layers, caches, token, at)
            return caches

        return run

    def training_in_a_scan(self) -> Callable[[], Any]:
        """50 steps with momentum of 4 layers of 32, data parallel."""
        weights = [self._put(self._normal(32, 32) * 0.1) for _ in range(4)]
        data = self._put(self._normal(50, 64, 32), None, "x")

        def loss(weights: Any, x: jax.Array) -> jax.Array:
            for w in weights:
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        @jax.jit
        def run(weights: Any, data: jax.Array) -> jax.Array:
            def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
                weights, moments = state
                value, gradient = jax.value_and_grad(loss)(weights, x)
                moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
                return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments), value

            return lax.scan(step, (weights, [w * 0 for w in weights]), data)[1]

        return lambda: run(weights, data)

    def training_called_from_python(self) -> Callable[[], Any]:
        """5 steps of Adam of a perceptron of 8 layers: 72 arrays, whose losses are read one by one."""
        weights = [self._put(self._normal(64, 64) * 0.1) for _ in range(8)]
        biases = [self._put(self._normal(64) * 0.1) for _ in range(8)]
        xs, ys = (self._put(self._normal(256, 64), "x") for _ in range(2))

        def loss(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            for w, b in zip(*layers, strict=True):
                x = jnp.tanh(x @ w + b)
            return ((x - y) ** 2).mean()

        @partial(jax.jit, donate_argnums=0)
        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            layers, first, second = state
            value, gradients = jax.value_and_grad(loss)(layers, x, y)
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
            layers = jax.tree.map(
                lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), layers, first, second
            )
            return (layers, first, second), value

        def run() -> Any:
            zeros = jax.tree.map(jnp.zeros_like, (weights, biases))
            state = jax.tree.map(jnp.copy, ((weights, biases), zeros, zeros))
            losses = []
            for _ in range(5):
                state, value = step(state, xs, ys)
                losses.append(float(value))
            return losses

        return run

    def pmap_called_from_python(self) -> Callable[[], Any]:
        """20 steps of replicas whose gradients are averaged; the batch comes from the host."""
        weights, data = self._normal(DEVICES, 32, 32), self._normal(DEVICES, 16, 32)

        def step(w: jax.Array, x: jax.Array) -> jax.Array:
            gradient = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
            return w - 0.1 * lax.pmean(gradient, "i")

        mapped = jax.pmap(step, axis_name="i", devices=list(self.mesh.devices))

        def run() -> Any:
            w: Any = weights
            for _ in range(20):
                w = mapped(w, data)
            return w

        return run

    def progress_told_from_a_loop(self) -> Callable[[], Any]:
        """200 sums over all devices, every 50th of which a function of each device is told."""
        told: list[float] = []

        def local(x: jax.Array) -> jax.Array:
            def step(i: jax.Array, x: jax.Array) -> jax.Array:
                total = lax.psum(x.sum(), "x")
                tell = partial(jax.debug.callback, lambda t: told.append(float(t)), total)
                lax.cond(i % 50 == 0, tell, lambda: None)
                return x * 0.9 + total * 1e-6

            return lax.fori_loop(0, 200, step, x)

        x, spec = self._put(self._normal(DEVICES, 4), "x"), P("x")
        run = jax.jit(
            jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )
        return lambda: run(x)

    def callbacks_in_a_loop(self) -> Callable[[], Any]:
        """10 calls into Python, of the whole array."""
        x = self._put(self._normal(64, 8), "x")

        def step(_: Any, x: jax.Array) -> jax.Array:
            kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return x + jax.pure_callback(lambda a: np.asarray(a) * 0.5, kind, x)

        run = jax.jit(lambda x: lax.fori_loop(0, 10, step, x))
        return lambda: run(x)


def awaited_run(run: Callable[[], Any]) -> None:
    jax.block_until_ready(run())


def total(result: Any) -> float:
    return float(sum(np.abs(np.asarray(a, np.float64)).sum() for a in jax.tree.leaves(result)))


def main() -> None:
    args = options(__doc__ or "")
    on_both_platforms(DEVICES)
    names = [name for name in vars(Programs) if not name.startswith("_")]
    first: dict[str, dict[str, list[float]]] = {}
    later: dict[str, dict[str, list[float]]] = {}
    for name in names:
        runs, sums = {}, {}
        for platform, label in PLATFORMS.items():
            jax.config.update("jax_default_device", jax.devices(platform)[0])
            began = time.perf_counter()
            runs[platform] = getattr(Programs(platform), name)()
            sums[platform] = total(jax.block_until_ready(runs[platform]()))
            first.setdefault(name, {})[label] = [time.perf_counter() - began]
        if abs(sums["stretto"] - sums["cpu"]) > TOLERANCE * abs(sums["cpu"]):
            raise RuntimeError(f"{name}: sums {sums}")
        awaited = {p: partial(awaited_run, run) for p, run in runs.items()}
        later[name] = platforms_in_turns(awaited, 6 if args.quick else 24, 3)
    show("first run of small programs, 8 devices of one process", first, "JAX CPU")
    goals = dict.fromkeys(names, "≤ 1.1x")
    show("later runs", later, "JAX CPU", goals, target=args.json)


if __name__ == "__main__":
    main()
