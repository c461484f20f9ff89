"""A ``fori_loop`` of 10 ``psum``s of 16 KiB to 4 MiB: compiled code beside the walk, by size.

8 devices of one process and 2 ranks. From some size on (`NativePolicy` in hlo_frontend/native.py) both are
the walk.
"""

from __future__ import annotations

from contextlib import ExitStack

from harness import in_turns, options, show, start
from two_ranks import free_address

KIB = (16, 64, 256, 1024, 4096)
TRIPS = 10


def main() -> None:
    args = options(__doc__ or "")
    repeats = 3 if args.quick else 9
    for ranks, devices in ((1, 8), (2, 1)):
        local = {"STRETTO_LOCAL_DEVICES": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
        stretto = {"JAX_PLATFORMS": "stretto,cpu", **local}
        launcher = "mpi" if ranks > 1 else "plain"
        starts = {
            "stretto": ("stretto", launcher, stretto),
            "walked": ("stretto", launcher, {**stretto, "STRETTO_NATIVE": "0"}),
            "JAX CPU": ("gloo", "plain", {"JAX_PLATFORMS": "cpu", **local}),
        }
        with ExitStack() as stack:
            contenders = []
            for label, (name, how, env) in starts.items():
                more = {"BENCH_COORDINATOR": free_address()} if name == "gloo" else {}
                contender = start(name, "contenders.py", ranks, how, **env, **more)
                stack.callback(contender.close)
                contender.name = label
                contenders.append(contender)
            cases = {
                f"{k} KiB": {"bytes": k << 10, "trips": TRIPS, "calls": 2 if args.quick else 5}
                for k in KIB
            }
            times = in_turns(contenders, cases, repeats)
        where = f"{ranks} ranks" if ranks > 1 else f"{devices} devices of one process"
        show(f"{TRIPS} psums in fori_loop, {where}", times, "stretto", target=args.json)


if __name__ == "__main__":
    main()
