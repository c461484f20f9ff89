"""Ranks of one host compile each program once, and nobody waits for one that does not compile it."""

from __future__ import annotations

import json

import pytest
from support.mpi import run_ranks

# All ranks compile a program that communicates; before it each compiles one for which no other rank asks.
SCRIPT = """
import gc, json, sys
import jax, numpy as np, jax.numpy as jnp
import stretto
from stretto.plugin import executable, executable_codec
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))
rank = jax.process_index()
lone = jax.jit(lambda a: jnp.cos(a) * (rank + 2))(np.float32(1))
before = stretto.compilations()

def f(x):
    y = jnp.tanh(x) @ x.T
    return jax.lax.fori_loop(0, 3, lambda i, a: a / a.sum(), y), jnp.sort(x, axis=0)

values = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda i: values[i])
lowered = jax.jit(f).lower(x)
calls = []
def watched(of, name):
    real = getattr(of, name)
    def call(*arguments):
        calls.append((name, gc.isenabled()))
        return real(*arguments)
    setattr(of, name, call)
watched(executable, "_digest")
watched(executable_codec, "to_bytes")
watched(executable_codec, "from_bytes")
compiled = lowered.compile()
after = stretto.compilations()
found = compiled(x)
bits = [np.asarray(a.addressable_data(0)).tobytes().hex() for a in found]
line = {"rank": rank, "lone": float(lone), "programs": after.programs - before.programs,
    "restored": after.restored - before.restored, "bits": bits, "calls": calls,
    "text": str(stretto.explain(compiled)), "hlo": compiled.as_text()}
sys.stdout.write(json.dumps(line) + chr(10))
"""


def run(ranks: int, **options: str) -> list[dict[str, object]]:
    env = {"JAX_PLATFORMS": "stretto", **options}
    done = run_ranks(ranks, ["-c", SCRIPT], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "again" not in done.stderr
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda row: row["rank"])


@pytest.mark.quick("1")
@pytest.mark.parametrize("devices", ["1", "2"])
def test_ranks_of_one_host_compile_a_program_once(devices: str) -> None:
    alone = run(2, STRETTO_SHARE_COMPILED="0", STRETTO_LOCAL_DEVICES=devices)
    assert [row["programs"] for row in alone] == [1, 1]
    together = run(2, STRETTO_LOCAL_DEVICES=devices)
    assert sorted(row["programs"] for row in together) == [0, 1]
    assert sorted(bool(row["restored"]) for row in together) == [False, True]
    for one, other in zip(alone, together, strict=True):
        for what in ("lone", "bits", "text", "hlo"):
            assert one[what] == other[what], what
    # A digest is made by the rank that compiles, and nothing is collected on the way of a program.
    calls = {True: [["_digest", False], ["to_bytes", False]], False: [["from_bytes", False]]}
    assert [row["calls"] for row in together] == [calls[bool(row["programs"])] for row in together]
    assert [row["calls"] for row in alone] == [calls[True][:1]] * 2
