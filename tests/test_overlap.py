"""Programs scheduled for overlap give the bits that they give without, in one process and under mpiexec.

Both are walked: what is compiled as a whole, which a plan prevents, may contract other products.
The table of costs makes communication so slow and launches so cheap that whatever can be moved is moved.
``STRETTO_TEST_FULL=1`` runs all programs of the library, in one process too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from stretto.conformance import judge
from stretto.conformance.programs import PROGRAMS

FULL = bool(os.environ.get("STRETTO_TEST_FULL"))
# Programs with something to move: several collectives, compute between them, loops, branches, groups.
FAMILIES = (
    "model/fsdp", "model/transformer", "model/pipeline", "loops/scan_stack", "branches/switch_in_scan",
    "divergence/nested", "many/chain", "many/independent", "grad/scan", "grad/remat", "send_recv/loop",
)  # fmt: skip
TABLE = {
    "compute": {"flops_per_s": 1e9, "bytes_per_s": 1e9, "launch_s": 1e-9},
    "links": [
        {"axis_stride": stride, "group_size": size, "latency_s": 1e-4, "bytes_per_s": 1e8}
        for stride in range(1, 8)
        for size in range(2, 9)
    ],
}
FORMS = ["2x4", "1x8"] if FULL else ["2x4"]


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize("name", FORMS)
def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    if judge.find_mpiexec() is None:
        pytest.skip("no mpiexec: install the extra 'mpi', or an MPI")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(TABLE))
    form = judge.FORMS[name]
    walked = ("STRETTO_NATIVE", "0")
    settings = {
        "without": (walked, ("STRETTO_OVERLAP", "0")),
        "with": (walked, ("STRETTO_COSTS", str(costs))),
    }
    chosen = [
        n
        for n, program in PROGRAMS.items()
        if form.name in program.forms and not program.only_full and (FULL or n.startswith(FAMILIES))
    ]
    outcomes = {
        how: judge.run_programs(
            dataclasses.replace(form, settings=chosen_settings), chosen, tmp_path / how
        )
        for how, chosen_settings in settings.items()
    }
    problems = []
    for n in chosen:
        failed = [f"{n} {how}: {o[n].problem}" for how, o in outcomes.items() if o[n].problem]
        problems += failed
        if not failed:
            want = judge.assemble(outcomes["without"][n].load())
            found = judge.differences(want, outcomes["with"][n].load(), True, None)
            problems += [f"{n}: {line}" for line in found]
    assert not problems, "\n".join(problems[:8])
