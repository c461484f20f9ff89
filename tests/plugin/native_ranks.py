"""The ranks' side of `test_native_ranks`: the cases of `test_native` with devices in several processes.

Every rank compares the results of all devices. Prints what failed, and ends with 1 if something did.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import test_native as cases


def chosen() -> dict[str, Callable[[], None]]:
    devices = jax.devices()
    assert len(devices) == cases.N and jax.process_count() > 1
    mesh = Mesh(np.array(devices), ("x",))
    sums = ["int8", "uint32", "float64", "complex64", "bool"]
    return {
        **{f"sums of {d}": partial(cases.test_sums, mesh, d) for d in sums},
        **{
            f"{name} of {d}": partial(cases.test_extremes, mesh, name, f, d)
            for d in ("int16", "float32")
            for name, f in (("pmin", np.minimum), ("pmax", np.maximum))
        },
        **{
            f"moves {d} along {axis}": partial(cases.test_data_that_moves, mesh, d, axis)
            for d, axis in (("int32", 0), ("bfloat16", 1))
        },
        **{
            f"{name} of halves": partial(
                cases.test_halves_are_accumulated_in_f32, mesh, name, "bfloat16"
            )
            for name in ("psum", "psum_scatter")
        },
        **{f"scatter along {a}": partial(cases.test_reduce_scatter, mesh, a) for a in (0, 1)},
        "several operands": partial(cases.test_several_operands_and_groups, devices),
        "groups that leave": partial(
            cases.test_groups_that_leave_a_loop_at_different_times, devices
        ),
        "condition": partial(cases.test_a_condition_that_communicates_alone, mesh),
        "donation": partial(cases.test_a_donated_argument_is_used_up, mesh),
        "beside a walk": partial(cases.test_native_and_walk_beside_each_other, mesh),
    }


def main() -> int:
    failed = 0
    for name, case in chosen().items():
        try:
            case()
        except Exception:
            failed += 1
            print(f"rank {jax.process_index()}: {name}\n{traceback.format_exc()}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
