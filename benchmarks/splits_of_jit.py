"""What splitting saves of steps that `jit` shards by itself, as predicted: no device runs anything.

    python benchmarks/splits_of_jit.py [PROGRAM …]

Two transformer layers in bf16, forward and backward, on a mesh (data, model) of eight devices that this
process has alone. Weights are tensor parallel along ``model``, batches spread along ``data``.

- ``tensor``: activations are whole on all devices of ``model``, so products end in all-reduces.
- ``sequence``: between products each has some rows of every sequence: all-gathers and reduce-scatters.

Printed for each, by a table of costs in which messages take about as long as compute: milliseconds of a step,
and of them exposed, without and with ``STRETTO_SPLIT``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DEVICES = 8
BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 4, 512, 2048, 8192, 16
PROGRAMS = {
    "tensor 1 x 8": (1, 8, False),
    "tensor 2 x 4": (2, 4, False),
    "sequence 1 x 8": (1, 8, True),
    "sequence 2 x 4": (2, 4, True),
}


def table(memory: float) -> dict[str, Any]:
    """Costs of a device, with so many bytes of memory a second, and of every span that the meshes have."""
    spans = [(1, 8), (1, 4), (4, 2), (1, 2)]
    return {
        "compute": {"flops_per_s": 32e12, "bytes_per_s": memory, "launch_s": 0.0},
        "links": [
            {"axis_stride": stride, "group_size": n, "latency_s": 12e-6, "bytes_per_s": 17e9}
            for stride, n in spans
        ],
    }


def lowered(data: int, model: int, sequence: bool) -> Any:
    """The step of a program, lowered for the mesh."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spread = P("data", "model") if sequence else P("data")

    def of(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def placed(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spread))

    def normalized(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        given = normalized(x)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", given, weights[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        mixed = jnp.einsum("bhst,bthk->bshk", scores, v)
        x = placed(x + placed(jnp.einsum("bshk,hkd->bsd", mixed, weights["o"])))
        hidden = jax.nn.gelu(normalized(x) @ weights["up"])
        return placed(x + placed(hidden @ weights["down"]))

    def loss(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for own in weights:
            x = layer(own, x)
        return (normalized(x) ** 2).sum()

    heads = (WIDTH, HEADS, WIDTH // HEADS)
    weights = {name: of(heads, P(None, "model")) for name in "qkv"} | {
        "o": of((HEADS, WIDTH // HEADS, WIDTH), P("model")),
        "up": of((WIDTH, HIDDEN), P(None, "model")),
        "down": of((HIDDEN, WIDTH), P("model")),
    }
    x = of((BATCH * data, LENGTH, WIDTH), spread)
    return jax.jit(jax.value_and_grad(loss)).lower([weights] * 2, x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []], help="all of them if none")
    parser.add_argument("--memory", type=float, default=134.0, help="rate of memory, GB/s")
    options = parser.parse_args()
    programs = options.programs or list(PROGRAMS)
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        costs.write_text(json.dumps(table(options.memory * 1e9)))
        os.environ |= {
            "JAX_PLATFORMS": "stretto",
            "STRETTO_LOCAL_DEVICES": str(DEVICES),
            "STRETTO_COSTS": str(costs),
        }
        for program in programs:
            _report(program)
    return 0


def _report(program: str) -> None:
    import stretto

    step = lowered(*PROGRAMS[program])
    cells = []
    for split in (0, 1):
        plan = stretto.explain(step.compile(compiler_options={"stretto_split": split})).plan
        assert plan is not None
        found = plan["summary"]
        cells.append(f"{found['predicted_ms']:.2f} ({found['exposed_ms']:.2f} exposed)")
    parts = sorted({split["parts"] for split in plan["summary"]["splits"]})
    print(f"{program:16} whole {cells[0]}, split {cells[1]} ms; parts: {parts}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
