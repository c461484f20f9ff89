"""Train a classifier of handwritten digits, data-parallel and tensor-parallel at once.

Plain JAX: a 2 x 2 mesh, parameters sharded over 'model', images over 'data', one `jax.jit`. The
partitioner inserts the collectives. The same file runs

    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/train_digits.py        # four ranks
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 python examples/train_digits.py
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_digits.py

The digits (1,797 images of 8 x 8, ten classes) come with scikit-learn. The last line printed is a JSON
object with the final loss and accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HIDDEN = 256
CLASSES = 10
BATCH = 128
LEARNING_RATE = 2e-3

Params = dict[str, Any]

# Megatron's way: the first layer split by columns, the second by rows, so that one all-reduce over
# 'model' joins them; the last layer is small and kept whole.
PARAMETER_SPECS = {
    "w1": P(None, "model"),
    "b1": P("model"),
    "w2": P("model", None),
    "b2": P(),
    "w3": P(),
    "b3": P(),
}


def initial_parameters(seed: int) -> Params:
    """Host arrays, the same on every process."""
    generator = np.random.default_rng(seed)

    def weights(rows: int, columns: int) -> np.ndarray:
        scale = np.sqrt(2 / rows)
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32)

    return {
        "w1": weights(64, HIDDEN),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": weights(HIDDEN, HIDDEN // 2),
        "b2": np.zeros(HIDDEN // 2, np.float32),
        "w3": weights(HIDDEN // 2, CLASSES),
        "b3": np.zeros(CLASSES, np.float32),
    }


def logits(parameters: Params, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
    hidden = jax.nn.relu(hidden @ parameters["w2"] + parameters["b2"])
    return hidden @ parameters["w3"] + parameters["b3"]


def loss_of(parameters: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits(parameters, images))
    return -jnp.mean(jnp.sum(scores * jax.nn.one_hot(labels, CLASSES), axis=-1))


def train_step(state: Params, images: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
    """One step of Adam."""
    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"], images, labels)
    step = state["step"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["second"], gradients)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    parameters = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state["parameters"], first, second
    )
    return {"parameters": parameters, "first": first, "second": second, "step": step}, loss


def accuracy_of(parameters: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(logits(parameters, images), axis=-1) == labels)


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which every process makes the shards of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def batches(count: int, epoch: int) -> Iterator[np.ndarray]:
    """Indices of the batches of an epoch, shuffled alike on every process."""
    order = np.random.default_rng(epoch).permutation(count)
    for start in range(0, count - BATCH + 1, BATCH):
        yield order[start : start + BATCH]


def communication_seconds() -> float | None:
    """Seconds that this process has spent in communication, on stretto."""
    if jax.default_backend() != "stretto":
        return None
    import stretto

    return stretto.stats().seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a digits classifier on a 2 x 2 mesh.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    devices = jax.devices()
    if len(devices) < 4:
        print(
            f"train_digits needs 4 devices and found {len(devices)} ({jax.default_backend()}). Start "
            "it with mpiexec -n 4, or set STRETTO_LOCAL_DEVICES=4",
            file=sys.stderr,
        )
        return 2
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "model"))
    shard = partial(NamedSharding, mesh)
    parameter_shardings = {name: shard(spec) for name, spec in PARAMETER_SPECS.items()}
    state_shardings = {
        "parameters": parameter_shardings,
        "first": parameter_shardings,
        "second": parameter_shardings,
        "step": shard(P()),
    }

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    # An even number of test images, for two halves of the data axis.
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=360, random_state=arguments.seed, stratify=labels
    )

    parameters = initial_parameters(arguments.seed)
    zeros = jax.tree.map(np.zeros_like, parameters)
    host_state = {
        "parameters": parameters,
        "first": zeros,
        "second": zeros,
        "step": np.zeros((), np.float32),
    }
    state = jax.tree.map(place, host_state, state_shardings)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, shard(P())))
    evaluate = jax.jit(accuracy_of, out_shardings=shard(P()))

    chief = jax.process_index() == 0
    console = Console(stderr=True, quiet=not chief)
    per_epoch = len(train_labels) // BATCH
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    epoch_losses: list[float] = []
    began = time.perf_counter()
    measured_from, communicated_from = began, communication_seconds()
    with Progress(*columns, console=console, disable=not chief) as progress:
        task = progress.add_task("training", total=arguments.epochs * per_epoch, loss=float("nan"))
        for epoch in range(arguments.epochs):
            losses = []
            for batch in batches(len(train_labels), epoch):
                state, loss = step(
                    state,
                    place(train_images[batch], shard(P("data", None))),
                    place(train_labels[batch], shard(P("data"))),
                )
                losses.append(loss)
            epoch_losses.append(float(np.mean([float(loss) for loss in losses])))
            progress.update(task, advance=per_epoch, loss=epoch_losses[-1])
            if epoch == 0:  # the first epoch compiles
                measured_from, communicated_from = time.perf_counter(), communication_seconds()
    ended = time.perf_counter()
    communicated = communication_seconds()

    accuracy = evaluate(
        state["parameters"],
        place(test_images, shard(P("data", None))),
        place(test_labels, shard(P("data"))),
    )
    steps = max(1, (arguments.epochs - 1) * per_epoch)
    result: dict[str, Any] = {
        "platform": jax.default_backend(),
        "processes": jax.process_count(),
        "loss": epoch_losses[-1],
        "accuracy": float(accuracy),
        "train_seconds": round(ended - began, 3),
        "step_ms": round(1e3 * (ended - measured_from) / steps, 3),
    }
    if communicated is not None and communicated_from is not None:
        result["communication_ms"] = round(1e3 * (communicated - communicated_from) / steps, 3)
    if chief:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
