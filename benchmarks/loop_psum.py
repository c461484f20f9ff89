"""A ``fori_loop`` of 200 ``psum``s of 8 floats between two ranks: what a collective in a loop costs."""

from __future__ import annotations

from harness import in_turns, options, show
from two_ranks import LABELS, two_ranks


def main() -> None:
    args = options(__doc__ or "")
    case = {"bytes": 32, "trips": 200, "calls": 2 if args.quick else 5}
    label = "200 x psum of 8 floats"
    with two_ranks() as contenders:
        times = in_turns(contenders, {label: case}, 5 if args.quick else 15)
    show(
        "psum in fori_loop, 2 ranks",
        times,
        LABELS["stretto"],
        {label: "gloo ≥ 3x"},
        target=args.json,
    )


if __name__ == "__main__":
    main()
