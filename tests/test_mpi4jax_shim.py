"""`benchmarks/shims/mpi4jax.py`: each of mpi4jax's functions against mpi4py's on the same ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mpi import run_ranks

SHIMS = Path(__file__).parents[1] / "benchmarks" / "shims"
SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import mpi4jax as m

world = MPI.COMM_WORLD
jax.devices()
rank, size = world.rank, world.size
x = (np.arange(6, dtype=np.float32).reshape(3, 2) + 1) * (rank + 1)
right, left = (rank + 1) % size, (rank - 1) % size

def theirs(call, like):
    out = np.empty_like(like)
    call(out)
    return out

everybodys = theirs(lambda out: world.Allgather(x, out), np.empty((size, *x.shape), x.dtype))
rows = np.stack([x + 10 * r for r in range(size)])
cases = {
    "allreduce": (lambda x: m.allreduce(x, MPI.SUM), lambda: theirs(lambda o: world.Allreduce(x, o), x)),
    "prod": (lambda x: m.allreduce(x, MPI.PROD), lambda: np.prod(everybodys, axis=0)),
    "max": (lambda x: m.reduce(x, MPI.MAX, 0), lambda: everybodys.max(axis=0) if rank == 0 else x),
    "allgather": (m.allgather, lambda: everybodys),
    "gather": (lambda x: m.gather(x, 0), lambda: everybodys if rank == 0 else x),
    "alltoall": (lambda _: m.alltoall(rows),
                 lambda: theirs(lambda o: world.Alltoall(rows, o), rows)),
    "scatter": (lambda _: m.scatter(rows if rank == 0 else x, 0), lambda: everybodys[0] + 10 * rank),
    "scan": (lambda x: m.scan(x, MPI.SUM), lambda: theirs(lambda o: world.Scan(x, o), x)),
    "bcast": (lambda x: m.bcast(x, 1), lambda: everybodys[1]),
    "sendrecv": (lambda x: m.sendrecv(x, x, left, right), lambda: everybodys[left]),
    "swap": (lambda x: m.sendrecv(x, x, rank ^ 1, rank ^ 1), lambda: everybodys[rank ^ 1]),
}
for name, (ours, wanted) in cases.items():
    for how, call in (("now", ours), ("jit", jax.jit(ours))):
        np.testing.assert_allclose(call(jnp.asarray(x)), wanted(), rtol=1e-6, err_msg=f"{name} {how}")

@jax.jit
def in_turn(x):  # rank 0 sends first, rank 1 receives first; each pair by itself
    if rank % 2 == 0:
        m.send(x, rank + 1)
        return m.recv(x, rank + 1)
    got = m.recv(x, rank - 1)
    m.send(x, rank - 1)
    return got
np.testing.assert_array_equal(in_turn(jnp.asarray(x)), everybodys[rank ^ 1])

gradient = jax.jit(jax.grad(lambda x: (m.sendrecv(x, x, left, right) * (rank + 1)).sum()))(x)
np.testing.assert_array_equal(gradient, np.full(x.shape, right + 1))
halves = world.Split(rank // 2)
np.testing.assert_allclose(m.allreduce(x, MPI.SUM, comm=halves),
                           everybodys[rank // 2 * 2 : rank // 2 * 2 + 2].sum(axis=0))
jax.jit(lambda: m.barrier())()
for bad, why in ((lambda: m.recv(x, MPI.ANY_SOURCE), "ANY_SOURCE"),
                 (lambda: jax.jit(lambda x: m.send(x, 100))(x), "dest is 100: there are 4 ranks")):
    try:
        bad()
    except ValueError as error:
        print(rank, "refused" if why in str(error) else error, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.mpi
def test_each_function_on_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_LOCAL_DEVICES": "1", "PYTHONPATH": str(SHIMS)}
    done = run_ranks(4, script, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"{rank // 2} refused" for rank in range(8)]
