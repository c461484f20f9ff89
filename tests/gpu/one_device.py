"""Run by test_gpu.py: what programs do on one device, each by itself, against NumPy or JAX's CPU backend.

Prints ``right NAME``, ``left NAME: why`` where a package is missing, or ``wrong NAME: …``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

CASES: dict[str, Callable[[], None]] = {}
RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((64, 64)).astype(np.float32)
S = A @ A.T + 64 * np.eye(64, dtype=np.float32)
CPU = jax.local_devices(backend="cpu")[0]
close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def on_cpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """What JAX's CPU backend gives."""
    with jax.default_device(CPU):
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(arguments, CPU)))


def as_on_cpu(function: Callable[..., Any], *arguments: Any, rtol: float = 2e-4) -> None:
    want = on_cpu(function, *arguments)
    jax.tree.map(partial(close, rtol=rtol, atol=rtol), jax.jit(function)(*arguments), want)


for name, function, argument in (
    ("add", lambda x: x + 1, np.arange(8.0)),
    ("matmul", lambda a: a @ a, A),
    ("cholesky", jnp.linalg.cholesky, S),
    ("eigenvalues", lambda a: jnp.linalg.eigh(a)[0], S),
    ("singular_values", lambda a: jnp.linalg.svd(a)[1], A),
    ("qr", lambda a: jnp.matmul(*jnp.linalg.qr(a)), A),
    ("solve", lambda a: jnp.linalg.solve(a, a.T @ a), S),
    ("fft", lambda a: jnp.abs(jnp.fft.fft(a)), A),
    ("sort", jnp.sort, A),
    ("scan", lambda x: lax.scan(lambda c, _: (c * 0.5 + 1, c), x, None, length=100), A),
    ("loop_of_data", lambda x: lax.while_loop(lambda c: (c < 999).any(), lambda c: 2 * c, x), abs(A) + 1),
    ("branch", lambda x: lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, x), A),
    ("gradient", jax.grad(lambda a: jnp.tanh(a @ a).sum()), A / 8),
    ("convolution", lambda x: lax.conv(x, x[:, :, :3, :3], (1, 1), "SAME"), A.reshape(4, 4, 16, 16)),
    ("random_numbers", lambda x: x + jax.random.normal(jax.random.key(3), x.shape), A),
):  # fmt: skip
    CASES[name] = partial(as_on_cpu, function, argument, rtol=1e-3)


@case
def matmul_of_bf16() -> None:
    b = jnp.asarray(A, jnp.bfloat16)
    close(np.asarray((b @ b).astype(jnp.float32)), A @ A, rtol=0.1, atol=1.0)


@case
def eigenvalues_of_any_matrix() -> None:
    found = np.sort_complex(np.asarray(jnp.linalg.eig(A)[0]))
    close(found, np.sort_complex(np.linalg.eig(A)[0]), rtol=1e-2, atol=1e-2)


@case
def callback_with_a_result() -> None:
    x = np.arange(8, dtype=np.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    close(jax.jit(lambda x: 2 * jax.pure_callback(np.sin, like, x))(x), 2 * np.sin(x))


@case
def ordered_callbacks_in_a_loop() -> None:
    seen: list[int] = []

    def body(i: Any, x: Any) -> Any:
        io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
        return x + 1

    assert jax.jit(lambda x: lax.fori_loop(0, 5, body, x))(0) == 5
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


@case
def donation_in_place() -> None:
    x = jnp.ones(1000)
    place = x.unsafe_buffer_pointer()
    y = jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    assert x.is_deleted() and y.unsafe_buffer_pointer() == place


@case
def types() -> None:
    names = "bool int4 int8 uint8 int16 int32 int64 float8_e4m3fn float16 bfloat16 float32 float64 complex64"
    with jax.enable_x64(True):
        for name in names.split():
            host = np.asarray(jnp.arange(4) % 2, jnp.dtype(name)).reshape(2, 2)
            found = np.asarray(jax.jit(lambda x: x.T[::-1])(host))
            assert found.dtype == host.dtype and (found == host.T[::-1]).all(), name


@case
def lent_to_cupy() -> None:
    x, cupy = jnp.arange(10.0), importlib.import_module("cupy")
    lent = cupy.from_dlpack(x)
    assert lent.data.ptr == x.unsafe_buffer_pointer()
    close(cupy.asnumpy(lent * 2), np.arange(10.0) * 2)


@case
def lent_to_torch() -> None:
    torch = importlib.import_module("torch")
    lent = torch.from_dlpack(jnp.arange(10.0) + 1)
    assert lent.is_cuda
    close((lent * 2).cpu().numpy(), (np.arange(10.0) + 1) * 2)


@case
def diffrax_solve_and_gradient() -> None:
    diffrax = importlib.import_module("diffrax")

    def solve(y: Any) -> Any:
        steps = diffrax.PIDController(1e-6, 1e-6)
        term, solver = diffrax.ODETerm(lambda t, y, _: -y), diffrax.Tsit5()
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, y, stepsize_controller=steps).ys

    close(jax.jit(solve)(jnp.ones(3)), np.full((1, 3), np.exp(-1)))
    close(jax.jit(jax.grad(lambda y: solve(y).sum()))(jnp.ones(3)), np.full(3, np.exp(-1)))


@case
def flax_training() -> None:
    linen, optax = importlib.import_module("flax.linen"), importlib.import_module("optax")
    layers = linen.Dense(64), linen.LayerNorm(), linen.relu, linen.Dense(10)
    model, rule = linen.Sequential(layers), optax.adamw(1e-2)
    x, labels = A[:32, :20], np.arange(32) % 10

    def trained(x: Any) -> Any:
        def loss(weights: Any) -> Any:
            scores = model.apply(weights, x)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        def step(state: Any, _: Any) -> Any:
            weights, moments = state
            value, gradient = jax.value_and_grad(loss)(weights)
            updates, moments = rule.update(gradient, moments, weights)
            return (optax.apply_updates(weights, updates), moments), value

        weights = model.init(jax.random.key(0), x)
        return lax.scan(step, (weights, rule.init(weights)), None, length=20)[1]

    as_on_cpu(trained, x, rtol=1e-2)


@case
def a_callback_that_raises() -> None:
    like = jax.ShapeDtypeStruct((), np.float32)
    raising = jax.jit(lambda x: jax.pure_callback(lambda a: 1 / 0, like, x))
    try:
        raising(np.float32(1)).block_until_ready()
    except Exception as error:
        assert "ZeroDivisionError" in str(error)
    else:
        raise AssertionError("nothing was raised")


@case
def more_memory_than_there_is() -> None:
    try:
        jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 38, jnp.float32) + 1)())
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error)
    else:
        raise AssertionError("nothing was raised")
    CASES["add"]()


for name, check in CASES.items():
    try:
        check()
        print("right", name, flush=True)
    except ModuleNotFoundError as error:
        print(f"left {name}: {error}", flush=True)
    except Exception as error:
        print(f"wrong {name}: {type(error).__name__}: {error}"[:500], flush=True)
