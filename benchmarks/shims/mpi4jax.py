"""mpi4jax's functions by JAX's collectives: its programs run on stretto without its C extension.

Put this folder first on PYTHONPATH, and `import mpi4jax` finds this file::

    PYTHONPATH=benchmarks/shims JAX_PLATFORMS=stretto,cpu mpiexec -n 4 python PROGRAM.py

mpi4jax programs are one program a process, each with arrays of its own. A call becomes a program for all
processes that take part, over a mesh of one device of each: outside of ``jit`` it is run there, within it by
an ordered callback, so in the order in which it stands. What it communicates are JAX's own collectives, so
stretto's order, errors, counts and watchdog hold for it.

Communicators are mpi4py's; which processes they have is all that is used of them. A send and its receive are
a program of two processes. Messages of a pair are matched in their order, whatever their tags; ``status`` has
the source. ``ANY_SOURCE`` is refused: JAX's collectives name their partners.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

__version__ = "0.9.1"
__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "bcast", "gather", "has_cuda_support",
    "has_sycl_support", "recv", "reduce", "scan", "scatter", "send", "sendrecv",
]  # fmt: skip

AXIS = "ranks"
_GATHERED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "SUM": lambda a: jnp.sum(a, axis=0, dtype=a.dtype),
    "MAX": lambda a: jnp.max(a, axis=0),
    "MIN": lambda a: jnp.min(a, axis=0),
    "PROD": lambda a: jnp.prod(a, axis=0, dtype=a.dtype),
    "LAND": lambda a: jnp.all(a != 0, axis=0).astype(a.dtype),
    "LOR": lambda a: jnp.any(a != 0, axis=0).astype(a.dtype),
    "LXOR": lambda a: (jnp.sum(a != 0, axis=0) % 2).astype(a.dtype),
    "BAND": lambda a: functools.reduce(jnp.bitwise_and, a),
    "BOR": lambda a: functools.reduce(jnp.bitwise_or, a),
    "BXOR": lambda a: functools.reduce(jnp.bitwise_xor, a),
}


def has_cuda_support() -> bool:
    return False


def has_sycl_support() -> bool:
    return False


def _ranks(comm: Any) -> tuple[int, ...]:
    """The processes of a communicator, as JAX numbers them."""
    if comm is None:
        return tuple(range(jax.process_count()))
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"expected: Intracomm, got: {type(comm).__name__} (in argument comm)")
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return tuple(MPI.Group.Translate_ranks(group, None, world))


def _integer(value: Any, name: str) -> int:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be static: it is traced, and a rank must be known when compiling"
        )
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"expected: int, got: {type(value).__name__} (in argument {name})")
    return int(value)


def _rank(value: Any, name: str, ranks: tuple[int, ...]) -> int:
    """A rank of a communicator, PROC_NULL or ANY_SOURCE."""
    rank = _integer(value, name)
    if not (0 <= rank < len(ranks) or rank in (MPI.PROC_NULL, MPI.ANY_SOURCE)):
        raise ValueError(f"{name} is {rank}: there are {len(ranks)} ranks")
    return rank


def _op(op: Any) -> str:
    if not isinstance(op, MPI.Op):
        raise TypeError(f"expected: Op, got: {type(op).__name__} (in argument op)")
    for name in _GATHERED:
        if op == getattr(MPI, name):
            return name
    raise ValueError(f"there is no such reduction for JAX arrays: {op}")


def _own(ranks: tuple[int, ...]) -> int:
    return ranks.index(jax.process_index())


@functools.cache
def _mesh(ranks: tuple[int, ...]) -> Mesh:
    first = {d.process_index: d for d in reversed(jax.devices())}
    return Mesh(np.array([first[r] for r in ranks]), (AXIS,))


@functools.cache
def _program(kind: str, ranks: tuple[int, ...], extra: Any) -> Callable[[jax.Array], jax.Array]:
    """The program of all ranks: takes and gives [ranks, ...], a row each."""
    if kind == "permute":

        def local(x):
            return lax.ppermute(x, AXIS, extra)
    elif kind == "allreduce" and extra in ("SUM", "MAX", "MIN"):
        reduce = {"SUM": lax.psum, "MAX": lax.pmax, "MIN": lax.pmin}[extra]

        def local(x):
            if x.dtype == bool:
                return _GATHERED[extra](lax.all_gather(x[0], AXIS))[None].astype(bool)
            return reduce(x, AXIS)
    elif kind == "allreduce":

        def local(x):
            return _GATHERED[extra](lax.all_gather(x[0], AXIS))[None]
    elif kind == "allgather":

        def local(x):
            return lax.all_gather(x[0], AXIS)[None]
    elif kind == "alltoall":

        def local(x):
            return lax.all_to_all(x[0], AXIS, 0, 0)[None]
    elif kind == "scan":

        def local(x):
            all_of = lax.all_gather(x[0], AXIS)
            index = lax.axis_index(AXIS)
            steps = [_GATHERED[extra](all_of[: n + 1]) for n in range(len(ranks))]
            return jnp.stack(steps)[index][None].astype(x.dtype)
    elif kind == "bcast":

        def local(x):
            mine = lax.axis_index(AXIS) == extra
            if x.dtype == bool:
                return lax.pmax((x & mine).astype(jnp.int8), AXIS).astype(bool)
            return lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), AXIS)
    else:
        raise AssertionError(kind)
    mapped = jax.shard_map(
        local, mesh=_mesh(ranks), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped)


def _run(kind: str, ranks: tuple[int, ...], extra: Any, x: Any) -> np.ndarray:
    """The row of this process of what the program of all makes of everybody's ``x``."""
    if kind == "sum back":
        return np.asarray(x)
    if kind == "exchange":
        return _exchanged(ranks, *extra, np.asarray(x))
    mesh = _mesh(ranks)
    own = mesh.devices.flat[_own(ranks)]
    row = jax.device_put(np.asarray(x)[None], own)
    shape = (len(ranks), *row.shape[1:])
    given = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P(AXIS)), [row])
    found = _program(kind, ranks, extra)(given)
    return np.asarray(found.addressable_shards[0].data)[0]


def _exchanged(ranks: tuple[int, ...], dest: int, source: int, x: np.ndarray) -> np.ndarray:
    """What ``source`` sends here, while ``x`` goes to ``dest``; ``x`` where nothing comes."""
    me = jax.process_index()
    to, come = (MPI.PROC_NULL if r == MPI.PROC_NULL else ranks[r] for r in (dest, source))
    if to == come == me:
        return x
    if to == come != MPI.PROC_NULL:
        pair = tuple(sorted((me, to)))
        return _run("permute", pair, ((0, 1), (1, 0)), x)
    found = x
    # Two programs of two processes each: all take them in one order, so that none waits for one that waits.
    halves = [(*sorted((me, other)), sends) for other, sends in ((to, True), (come, False))
              if other != MPI.PROC_NULL]  # fmt: skip
    for low, high, sends in sorted(halves):
        forward = (me == low) == sends
        row = _run("permute", (low, high), ((0, 1),) if forward else ((1, 0),), x)
        found = found if sends else row
    return found


def _told(status: Any, source: int) -> None:
    if source == MPI.ANY_SOURCE:
        raise ValueError("ANY_SOURCE: a receive must name its source here")
    if status is not None:
        status.Set_source(source)


def _shape(kind: str, ranks: tuple[int, ...], x: Any) -> tuple[int, ...]:
    return (len(ranks), *x.shape) if kind == "allgather" else x.shape


_ONE_SIDED = (
    "sendrecv has no forward-mode derivative: it may be on another rank than the one that wants it; "
    "use reverse mode"
)
# What JAX calls the order of ordered callbacks; calls of this file are in it.
_EFFECTS = jax.make_jaxpr(
    lambda x: io_callback(np.asarray, jax.ShapeDtypeStruct((), np.float32), x, ordered=True)
)(np.float32(0)).effects

call_p = Primitive("mpi_call")


def _later(
    x: jax.Array, *, kind: str, ranks: tuple[int, ...], extra: Any, backward: bool
) -> jax.Array:
    """A call within ``jit``."""
    if backward:
        raise RuntimeError(_ONE_SIDED)
    result = jax.ShapeDtypeStruct(_shape(kind, ranks, x), x.dtype)
    return io_callback(functools.partial(_run, kind, ranks, extra), result, x, ordered=True)


@call_p.def_effectful_abstract_eval
def _abstract(x: Any, *, kind: str, ranks: tuple[int, ...], extra: Any, backward: bool) -> Any:
    del extra, backward
    return ShapedArray(_shape(kind, ranks, x), x.dtype), _EFFECTS


@call_p.def_impl
def _now(x: Any, *, kind: str, ranks: tuple[int, ...], extra: Any, backward: bool) -> jax.Array:
    if backward:
        raise RuntimeError(_ONE_SIDED)
    return jnp.asarray(_run(kind, ranks, extra, x))


def _batched(arguments: Any, axes: Any, *, kind: str, **params: Any) -> tuple[jax.Array, int]:
    if kind in ("allgather", "alltoall"):
        raise NotImplementedError(f"vmap of {kind}")
    return call_p.bind(*arguments, kind=kind, **params), axes[0]


def _tangent(
    primals: Any, tangents: Any, *, kind: str, extra: Any, backward: bool, **params: Any
) -> Any:
    if not (kind in ("exchange", "sum back") or (kind, extra) == ("allreduce", "SUM")):
        raise NotImplementedError(f"the derivative of {kind} with {extra}")
    value = call_p.bind(*primals, kind=kind, extra=extra, backward=backward, **params)
    # A message's derivative is on the other rank, unless it is transposed.
    turned = (kind == "exchange") != backward
    tangent = ad.instantiate_zeros(tangents[0])
    return value, call_p.bind(tangent, kind=kind, extra=extra, backward=turned, **params)


def _transposed(y: Any, x: Any, *, kind: str, extra: Any, backward: bool, **params: Any) -> Any:
    del x
    turned = (kind == "exchange") != backward
    kind = {"allreduce": "sum back", "sum back": "allreduce"}.get(kind, kind)
    extra = extra[::-1] if kind == "exchange" else extra
    y = ad.instantiate_zeros(y)
    return (call_p.bind(y, kind=kind, extra=extra, backward=turned, **params),)


batching.primitive_batchers[call_p] = _batched
ad.primitive_jvps[call_p] = _tangent
ad.primitive_transposes[call_p] = _transposed
mlir.register_lowering(call_p, mlir.lower_fun(_later, multiple_results=False))


def _call(kind: str, ranks: tuple[int, ...], extra: Any, x: Any) -> jax.Array:
    """`_run`, now or, within a trace, when its turn comes."""
    return call_p.bind(jnp.asarray(x), kind=kind, ranks=ranks, extra=extra, backward=False)


def allreduce(x: Any, op: Any, *, comm: Any = None) -> jax.Array:
    """The reduction of all processes' ``x``, on all of them. The transpose of a sum is the identity."""
    return _call("allreduce", _ranks(comm), _op(op), x)


def reduce(x: Any, op: Any, root: int, *, comm: Any = None) -> jax.Array:
    """The reduction, on ``root``; its own ``x`` on others."""
    found = _call("allreduce", _ranks(comm), _op(op), jnp.asarray(x))
    return found if _own(_ranks(comm)) == _rank(root, "root", _ranks(comm)) else jnp.asarray(x)


def allgather(x: Any, *, comm: Any = None) -> jax.Array:
    ranks, x = _ranks(comm), jnp.asarray(x)
    return _call("allgather", ranks, None, x)


def gather(x: Any, root: int, *, comm: Any = None) -> jax.Array:
    found = allgather(x, comm=comm)
    return found if _own(_ranks(comm)) == _rank(root, "root", _ranks(comm)) else jnp.asarray(x)


def alltoall(x: Any, *, comm: Any = None) -> jax.Array:
    ranks, x = _ranks(comm), jnp.asarray(x)
    if x.ndim == 0 or x.shape[0] != len(ranks):
        raise ValueError("Alltoall input must have shape (nproc, ...)")
    return _call("alltoall", ranks, None, x)


def scatter(x: Any, root: int, *, comm: Any = None) -> jax.Array:
    """Row r of the root's ``x`` on process r, whose own ``x`` has the shape of a row."""
    ranks, x, root = _ranks(comm), jnp.asarray(x), _rank(root, "root", _ranks(comm))
    if _own(ranks) == root:
        if x.ndim == 0 or x.shape[0] != len(ranks):
            raise ValueError("Scatter input must have shape (nproc, ...)")
    else:
        x = jnp.zeros((len(ranks), *x.shape), x.dtype)
    found = _call("bcast", ranks, root, x)
    return found[_own(ranks)]


def scan(x: Any, op: Any, *, comm: Any = None) -> jax.Array:
    x = jnp.asarray(x)
    return _call("scan", _ranks(comm), _op(op), x)


def bcast(x: Any, root: int, *, comm: Any = None) -> jax.Array:
    return _call("bcast", _ranks(comm), _rank(root, "root", _ranks(comm)), jnp.asarray(x))


def barrier(*, comm: Any = None) -> None:
    """All processes' calls before any goes on. Within ``jit`` what comes behind it waits for it."""
    _call("allreduce", _ranks(comm), "SUM", jnp.zeros((), jnp.int32))


def sendrecv(
    sendbuf: Any, recvbuf: Any, source: int, dest: int, *, sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG, comm: Any = None, status: Any = None,
) -> jax.Array:  # fmt: skip
    """Send to ``dest``, receive from ``source``. Its gradient goes the other way."""
    del sendtag, recvtag
    ranks, x = _ranks(comm), jnp.asarray(sendbuf)
    send_to, take_from = _rank(dest, "dest", ranks), _rank(source, "source", ranks)
    like = jax.ShapeDtypeStruct(jnp.shape(recvbuf), jnp.asarray(recvbuf).dtype)
    if (like.shape, like.dtype) != (x.shape, x.dtype):
        raise ValueError(f"sendrecv sends {x.dtype}{list(x.shape)} and receives another type")
    _told(status, take_from)

    return _call("exchange", ranks, (send_to, take_from), x)


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    del tag
    ranks = _ranks(comm)
    _call("exchange", ranks, (_rank(dest, "dest", ranks), MPI.PROC_NULL), jnp.asarray(x))


def recv(
    x: Any, source: int, *, tag: int = MPI.ANY_TAG, comm: Any = None, status: Any = None
) -> jax.Array:
    del tag
    ranks = _ranks(comm)
    source = _rank(source, "source", ranks)
    _told(status, source)
    return _call("exchange", ranks, (MPI.PROC_NULL, source), jnp.asarray(x))
