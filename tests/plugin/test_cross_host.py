"""`device_put` between devices of different processes, in jobs of several ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.mpi import run_ranks
from support.scripts import reports_of

pytestmark = pytest.mark.mpi

_BEGIN = """
import json, sys
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

rank, devices = jax.process_index(), jax.devices()

def on(*ids):
    return NamedSharding(Mesh(np.array([devices[i] for i in ids]), ("x",)), P("x"))

def alone(id):
    return SingleDeviceSharding(devices[id])

def shards(array):
    return {str(s.device.id): np.asarray(s.data).astype(float).tolist() for s in array.addressable_shards}
"""

_END = """
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


def found_by(folder: Path, code: str, ranks: int, devices: int) -> list[Any]:
    """What each rank leaves in ``found``."""
    reports, err = reports_of(folder, _BEGIN + code + _END, devices, ranks)
    assert err == ""
    return reports


def test_shards_go_where_they_are_put(tmp_path: Path) -> None:
    code = """
x = np.arange(8.0, dtype=np.float32)
given = jax.device_put([x, 2 * x], on(0, 1))       # of rank 0
moved = jax.device_put(given, on(2, 3))            # all to rank 1
back = jax.device_put(moved, on(1, 0))             # the other way round
mixed = jax.device_put(given[0], on(3, 0))         # one to rank 1, one stays with the rank
spread = jax.device_put(jax.device_put(x, on(0, 2)), on(4, 1))  # ranks 0, 1 -> 2, 0
found = [shards(a) for a in (*moved, *back, mixed, spread)]
"""
    first, second = [0.0, 1, 2, 3], [4.0, 5, 6, 7]
    twice = [2 * v for v in first], [2 * v for v in second]
    assert found_by(tmp_path, code, 3, 6) == [
        [
            {},
            {},
            {"1": first, "0": second},
            {"1": twice[0], "0": twice[1]},
            {"0": second},
            {"1": second},
        ],
        [{"2": first, "3": second}, {"2": twice[0], "3": twice[1]}, {}, {}, {"3": first}, {}],
        [{}, {}, {}, {}, {}, {"4": first}],
    ]


def test_every_type_and_size(tmp_path: Path) -> None:
    code = """
jax.config.update("jax_enable_x64", True)
names = ["bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "int64", "float8_e4m3fn",
         "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
found = []
for name in names:
    for shape in ((), (0, 3), (5, 3), (4, 2000)):
        x = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7).astype(jnp.dtype(name))
        moved = jax.device_put(jax.device_put(x, alone(0)), alone(1))
        for shard in moved.addressable_shards:
            assert shard.data.dtype == x.dtype and shard.data.shape == shape
            found.append(np.asarray(shard.data).tobytes() == x.tobytes())
"""
    assert found_by(tmp_path, code, 2, 2) == [[], [True] * 64]


def test_a_pipeline_of_programs_and_transfers(tmp_path: Path) -> None:
    """Nothing is waited for: each rank asks for all of its transfers and programs, then looks."""
    code = """
double = jax.jit(lambda a: 2 * a, donate_argnums=0)
add = jax.jit(lambda a, b: a + b)
large = 1 << 16
state = jax.device_put(np.ones(large, np.float32), alone(0))
total = jax.device_put(np.zeros(large, np.float32), alone(1))
for _ in range(5):
    sent = jax.device_put(state, alone(1))
    if rank == 0:
        state = double(state)      # donated while its old content may still be on its way
    else:
        total = add(total, sent)
back = jax.device_put(total, alone(0))
found = sorted({v for a in shards(back).values() for v in a})
"""
    assert found_by(tmp_path, code, 2, 2) == [[1.0 + 2 + 4 + 8 + 16], []]


def test_beside_collectives_of_the_same_ranks(tmp_path: Path) -> None:
    code = """
mesh = Mesh(np.array(devices), ("x",))
summed = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
x = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh, P("x")))
moved = jax.device_put(np.full(3000, 7.0, np.float32), alone(0))
for k in range(20):
    moved = jax.device_put(moved, alone(2 if k % 2 == 0 else 0))
    x = x + summed(x)[0] / 6
found = [shards(x), sorted({v for a in shards(moved).values() for v in a})]
"""
    x = [0.0, 1.0, 2.0, 3.0]
    for _ in range(20):
        x = [v + sum(x) / 6 for v in x]
    (first, moved), (second, gone) = found_by(tmp_path, code, 2, 4)
    values = [shard[str(k)][0] for k, shard in enumerate([first, first, second, second])]
    assert values == pytest.approx(x, rel=1e-5)
    assert (moved, gone) == ([7.0], [])


def _fails(folder: Path, code: str, **env: str) -> str:
    script = folder / "script.py"
    script.write_text(_BEGIN + code)
    env |= {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "1"}
    done = run_ranks(2, [str(script)], env=env)
    assert done.returncode != 0
    return done.stderr


def test_a_transfer_that_is_never_sent_names_both_ranks(tmp_path: Path) -> None:
    code = """
x = jax.device_put(np.arange(4.0), alone(0))
if rank == 1:
    jax.device_put(x, alone(1)).block_until_ready()
else:
    import threading
    threading.Event().wait()
"""
    err = _fails(tmp_path, code, STRETTO_TIMEOUT="2")
    message = (
        r"transfer of f32\[4\] from device 0 to device 1 \(\S+script.py:19 in <module>\) timed out after "
        r"2 s \(STRETTO_TIMEOUT\): rank 0 did not reach it\n  rank 0 \(pid \d+ on .*\): in no collective "
        r"yet, main thread at \S+script.py:22 in <module>\n  rank 1 \(.*\): in transfer of f32\[4\] from"
    )
    assert re.search(message, err), err


def test_a_rank_that_ends_without_sending(tmp_path: Path) -> None:
    code = """
x = jax.device_put(np.arange(4.0), alone(0))
if rank == 1:
    jax.device_put(x, alone(1)).block_until_ready()
"""
    err = _fails(tmp_path, code)
    assert re.search(
        r"rank 0 \(pid \d+ on .*\) left the job too early: it ended while rank 1 waits for it in "
        r"transfer of f32\[4\] from device 0 to device 1",
        err,
    ), err


def test_what_does_not_match_is_an_error_where_it_arrives(tmp_path: Path) -> None:
    code = """
x = jax.device_put(np.arange(4 if rank == 0 else 6, dtype=np.float32), alone(0))
moved = jax.device_put(x, alone(1))
found = ""
if rank == 1:
    try:
        moved.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        found = str(error)
again = jax.device_put(jax.device_put(np.float32(5), alone(0)), alone(1))
found = [found, shards(again)]
"""
    script = tmp_path / "script.py"
    script.write_text(_BEGIN + code + _END)
    done = run_ranks(
        2,
        [str(script), str(tmp_path)],
        env={"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    said, again = json.loads((tmp_path / "1.json").read_text())
    assert "rank 0 sends f32[4] from device 0 to device 1, where rank 1 expects f32[6]" in said
    assert "script.py:18 in <module>" in said
    assert again == {"1": 5.0}


def test_a_program_without_devices_of_this_process(tmp_path: Path) -> None:
    """JAX runs it on all processes, for what its results are."""
    code = """
x = jax.device_put(np.arange(4.0, dtype=np.float32), on(2, 3))
y = jax.jit(lambda a: 2 * a)(x)
z = jax.jit(lambda a: a + 1)(jax.device_put(np.float32(1), alone(1)))
found = [str(y.shape), shards(y), shards(z)]
"""
    assert found_by(tmp_path, code, 2, 4) == [
        ["(4,)", {}, {"1": 2.0}],
        ["(4,)", {"2": [0.0, 2.0], "3": [4.0, 6.0]}, {}],
    ]
