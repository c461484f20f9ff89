"""Each collective over every form of group: axes of 2-D and 3-D meshes, several axes, index groups even and
uneven, permuted, reversed and partial device sets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from .common import manual, mesh, small, takes_part
from .registry import ALL_FORMS, Program, add

SHUFFLED = (3, 0, 6, 1, 7, 4, 2, 5)

MESHES: dict[str, tuple[dict[str, int], tuple[int, ...] | None, tuple[str, ...]]] = {
    "first_of_two": ({"a": 2, "b": 4}, None, ("a",)),
    "second_of_two": ({"a": 2, "b": 4}, None, ("b",)),
    "both_of_two": ({"a": 2, "b": 4}, None, ("a", "b")),
    "both_swapped": ({"a": 2, "b": 4}, None, ("b", "a")),
    "middle_of_three": ({"a": 2, "b": 2, "c": 2}, None, ("b",)),
    "outer_of_three": ({"a": 2, "b": 2, "c": 2}, None, ("a", "c")),
    "all_of_three": ({"a": 2, "b": 2, "c": 2}, None, ("a", "b", "c")),
    "reversed": ({"x": 8}, tuple(reversed(range(8))), ("x",)),
    "shuffled": ({"x": 8}, SHUFFLED, ("x",)),
    "shuffled_of_two": ({"a": 4, "b": 2}, SHUFFLED, ("a",)),
    "even_devices": ({"x": 4}, (0, 2, 4, 6), ("x",)),
    "three_devices": ({"x": 3}, (6, 1, 4), ("x",)),
    "across_two": ({"a": 2, "b": 3}, (0, 5, 2, 7, 3, 4), ("b",)),
    "one_device": ({"x": 1}, (5,), ("x",)),
}
CORE_MESHES = ("first_of_two", "second_of_two", "shuffled_of_two", "even_devices")


def collectives(
    shape: dict[str, int], order: tuple[int, ...] | None, axes: tuple[str, ...], dtype: str
) -> dict[str, Any]:
    """All kinds over ``axes`` of the mesh, on a local shape divisible by the group's size."""
    m = mesh(order=order, **shape)
    if not takes_part(m):
        return {}
    size = 1
    for a in axes:
        size *= m.shape[a]
    ring = [(i, (i + 1) % size) for i in range(size)]
    # A permutation numbers the devices in the mesh's order of axes; jax 0.12 refuses any other.
    in_order = tuple(a for a in m.axis_names if a in axes)

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(x, axes),
            lax.pmax(x, axes),
            lax.all_gather(x, axes, axis=1, tiled=True),
            lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
            lax.all_to_all(x, axes, 1, 1, tiled=True),
            lax.ppermute(x, in_order, ring),
        )

    names = ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute")
    x = small((m.devices.size, size * 2, 3), dtype, 11)
    return dict(zip(names, manual(m, f, x), strict=True))


INDEX_GROUPS: dict[str, list[list[int]]] = {
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "strided": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "unordered": [[5, 2, 0, 7], [6, 1, 3, 4]],
    "whole": [[7, 6, 5, 4, 3, 2, 1, 0]],
}
UNEVEN = {
    "uneven": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "uneven_far": [[0, 7], [1, 2, 3, 4, 5, 6]],
}


def index_groups(groups: list[list[int]]) -> dict[str, Any]:
    """Every collective that takes axis_index_groups."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        g: dict[str, Any] = {"axis_index_groups": groups}
        return (
            lax.psum(x, "x", **g),
            lax.pmin(x, "x", **g),
            lax.all_gather(x, "x", axis=1, **g),
            lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True, **g),
            lax.all_to_all(x, "x", 1, 1, tiled=True, **g),
        )

    names = ("psum", "pmin", "all_gather", "psum_scatter", "all_to_all")
    return dict(
        zip(names, manual(mesh(x=8), f, small((8, 8, 3), seed=12), check_vma=False), strict=True)
    )


def uneven_groups(groups: list[list[int]]) -> dict[str, Any]:
    """Groups of different sizes: only reductions have a shape that does not depend on the group."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        g = {"axis_index_groups": groups}
        return lax.psum(x, "x", **g), lax.pmax(x, "x", **g)

    out = manual(mesh(x=8), f, small((8, 5), seed=13), check_vma=False)
    return dict(zip(("psum", "pmax"), out, strict=True))


def register() -> None:
    for name, (axes, order, over) in MESHES.items():
        forms = ALL_FORMS if name in CORE_MESHES else Program.forms
        for dtype in ("float32", "bfloat16", "int8"):
            add(
                Program(
                    f"groups/{name}/{dtype}",
                    partial(collectives, axes, order, over, dtype),
                    exact=True,
                    forms=forms,
                    only_full=dtype != "float32" and name not in CORE_MESHES,
                )
            )
    for name, groups in INDEX_GROUPS.items():
        forms = ALL_FORMS if name == "unordered" else Program.forms
        run = partial(index_groups, groups)
        add(Program(f"index_groups/{name}", run, exact=True, forms=forms))
    for name, groups in UNEVEN.items():
        run = partial(uneven_groups, groups)
        add(Program(f"index_groups/{name}", run, exact=True, forms=ALL_FORMS))


register()
