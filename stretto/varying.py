"""Over which mesh axes values vary inside ``shard_map``: a loop's carry must begin as it goes on."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)


def axes_of(*values: Any) -> frozenset[Any]:
    """The axes over which any of these varies; none under ``check_vma=False``, where JAX keeps no account."""
    found: frozenset[Any] = frozenset()
    for value in values:
        kind = jax.typeof(value)
        # jax 0.10 and 0.11 have an object for it, others the set itself.
        manual = getattr(kind, "manual_axis_type", None)
        found |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def over(tree: Any, axes: frozenset[Any]) -> Any:
    """The same values, varying over these axes too."""

    def cast(value: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(value), key=str))
        return lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(cast, tree)
