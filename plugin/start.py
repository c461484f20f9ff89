"""What JAX has to know of stretto before it looks for plugins: who started the ranks, and the platforms.

`jax.distributed.initialize` without arguments asks JAX's table of launchers, which lacks MPICH's and is read
before any plugin is loaded. The option ``jax_platforms``, which the CPU backend is added to, must not change
under a program that makes devices: JAX's own tests compare all options from before and behind each. So a
line in ``stretto-start.pth``, which Python runs when it starts, calls `await_jax` in programs that ask for
stretto by ``JAX_PLATFORMS``, and in no other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_TABLE = "jax._src.clusters"


class _Finder:
    """Finds JAX's table as it is found without, and tells JAX of stretto once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        fill = spec.loader.exec_module

        def fill_and_add(module: ModuleType) -> None:
            fill(module)
            from . import jax_private

            jax_private.know_launchers()
            jax_private.offer_cpu()

        spec.loader.exec_module = fill_and_add  # type: ignore[method-assign]
        return spec


def await_jax() -> None:
    """Add to JAX's table of launchers and to its platforms when the table is imported."""
    sys.meta_path.insert(0, _Finder())
