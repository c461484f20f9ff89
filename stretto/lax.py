"""Token-chained collectives for JAX programs: `jax.lax`'s, each taking and returning a token.

A token is order and nothing else. ``y, token = psum(x, "i", token=token)`` starts after every collective
that `token` came through, on every rank, whatever the compiler makes of the rest of the program::

    token = stretto.lax.create_token()
    a, token = stretto.lax.all_gather(x, "i", token=token)
    b, token = stretto.lax.psum_scatter(y, "i", token=token)

Tokens are ordinary values: they pass through ``jit``, ``scan``, ``cond``, ``vmap`` and ``shard_map``. A token
is a ``bool[]`` that is tied to operands and results by ``lax.optimization_barrier``; on the stretto platform
such barriers become edges of the order and disappear from the program, and no byte of a token travels. On
other platforms the same barriers keep the same order.

Under ``grad`` the forward collectives keep their chain. The collectives of the backward pass are ordered by
their data, and by the schedule that all ranks agree on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util

# Operations are the user's: their source lines, in errors and traces, are those of the calls of this file.
source_info_util.register_exclusion(__file__)

AxisName = Any
Token = jax.Array


def create_token(_: object = None) -> Token:
    """A token that comes after nothing. Inside ``shard_map`` it varies over the mesh axes in use."""
    token = jnp.zeros((), jnp.bool_)
    # Before jax 0.12 what leaves a barrier varies over the axes of everything that entered it. A token
    # that varies from the start keeps its type through a scan.
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.pcast(token, axes, to="varying") if axes else token


def _chained(collective: Callable[[Any], Any], x: Any, token: Token) -> tuple[Any, Token]:
    """``collective(x)`` after ``token``, and a token that comes after it.

    Everything that enters a barrier must be used where it leaves: compilers drop the rest of a barrier,
    and the order with it.
    """
    x, token = jax.lax.optimization_barrier((x, token))
    y, token = jax.lax.optimization_barrier((collective(x), token))
    return y, token


def psum(x: Any, axis_name: AxisName, *, token: Token, **kwargs: Any) -> tuple[Any, Token]:
    """`jax.lax.psum` in the chain of ``token``."""
    return _chained(lambda x: jax.lax.psum(x, axis_name, **kwargs), x, token)


def pmax(x: Any, axis_name: AxisName, *, token: Token, **kwargs: Any) -> tuple[Any, Token]:
    """`jax.lax.pmax` in the chain of ``token``."""
    return _chained(lambda x: jax.lax.pmax(x, axis_name, **kwargs), x, token)


def pmin(x: Any, axis_name: AxisName, *, token: Token, **kwargs: Any) -> tuple[Any, Token]:
    """`jax.lax.pmin` in the chain of ``token``."""
    return _chained(lambda x: jax.lax.pmin(x, axis_name, **kwargs), x, token)


def all_gather(x: Any, axis_name: AxisName, *, token: Token, **kwargs: Any) -> tuple[Any, Token]:
    """`jax.lax.all_gather` in the chain of ``token``."""
    return _chained(lambda x: jax.lax.all_gather(x, axis_name, **kwargs), x, token)


def psum_scatter(x: Any, axis_name: AxisName, *, token: Token, **kwargs: Any) -> tuple[Any, Token]:
    """`jax.lax.psum_scatter` in the chain of ``token``."""
    return _chained(lambda x: jax.lax.psum_scatter(x, axis_name, **kwargs), x, token)


def all_to_all(
    x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, token: Token, **kwargs: Any
) -> tuple[Any, Token]:
    """`jax.lax.all_to_all` in the chain of ``token``."""
    return _chained(
        lambda x: jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, **kwargs), x, token
    )


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    token: Token | None = None,
    valid_iterations: Sequence[tuple[int, int]] | None = None,
) -> Any:
    """`jax.lax.ppermute`, in the chain of ``token`` if one is given: then with a new token.

    ``valid_iterations``: for each pair of ``perm`` the first and the last iteration, counted from 0 at each
    entry of the loop around it, in which the pair moves data; (1, 0) is never. In all others no message is
    sent and the target has zeros. stretto refuses to compile bounds that it cannot prove to leave out
    nothing that is read (``STRETTO_TRUST_VALID_ITERATIONS=1`` takes them as they are), other platforms
    pay no attention to them. The permute that ``grad`` makes of it has no bounds: without any, stretto finds
    them itself. Raises ``ValueError`` where there is not one pair of bounds for each pair of ``perm``.
    """
    perm = list(perm)
    if valid_iterations is None:

        def permuted(x: Any) -> Any:
            return jax.lax.ppermute(x, axis_name, perm)
    else:
        text = _bounds(perm, list(valid_iterations), axis_name)

        def permuted(x: Any) -> Any:
            return set_xla_metadata(
                jax.lax.ppermute(x, axis_name, perm), _xla_send_recv_validation=text
            )

    return permuted(x) if token is None else _chained(permuted, x, token)


def _bounds(
    perm: Sequence[tuple[int, int]], valid: Sequence[tuple[int, int]], axis_name: AxisName
) -> str:
    """Bounds as the attribute spells them: once for each position on the mesh's other axes, as pairs are."""
    if len(valid) != len(perm):
        raise ValueError(f"valid_iterations has {len(valid)} bounds for {len(perm)} pairs of perm")
    copies = jax.sharding.get_abstract_mesh().size // jax.lax.axis_size(axis_name)
    spelled = ",".join(f"{{{int(low)},{int(high)}}}" for low, high in valid)
    return "{" + ",".join([spelled] * copies) + "}"


def send(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, token: Token) -> Token:
    """Send ``x`` along ``perm``, pairs (source, target) of positions on the axis. See `recv`.

    A send does not wait for its receiver. Every send needs the `recv` of the same ``perm``. Runs where
    JAX's platform has send and receive: stretto, and GPUs.
    """
    return _chained(lambda x: _single_sided("psend")(x, axis_name, perm), x, token)[1]


def recv(
    out_shape: jax.ShapeDtypeStruct,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    token: Token,
) -> tuple[jax.Array, Token]:
    """Receive what `send` sent along ``perm``; zeros on devices that are no target of it."""
    return _chained(
        lambda start: _single_sided("precv")(start, out_shape, axis_name, perm),
        jax.lax.create_token(),
        token,
    )


def _single_sided(name: str) -> Any:
    # Deprecated in jax 0.12 without a successor; the warning is for those who name them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(jax.lax, name)
