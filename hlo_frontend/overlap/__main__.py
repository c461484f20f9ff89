"""``python -m stretto.hlo_frontend.overlap FILE --costs COSTS.json [--json]``: schedule a module's text.

FILE is HLO text or a serialized module, gzipped or not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

from stretto.runtime.errors import StrettoError

from ..graph import Module
from ..text import parse_hlo_text
from .costs import CostTable
from .ledger import ledger, summary, to_json
from .plan import plan_module


def read_module(path: Path) -> Module:
    """A module from a file of HLO text or a serialized ``HloModuleProto``, gzipped or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data.lstrip().startswith(b"HloModule"):
        data = parse_hlo_text(data.decode())
    return Module.parse(data)


def devices_of(module: Module) -> int:
    """How many partitions the module's groups and pairs name: one more than the largest id in them."""
    largest = 0
    for computation in module.computations:
        for instruction in computation.instructions:
            proto = instruction.proto
            listed = [*proto.collective_device_list.replica_groups, *proto.replica_groups]
            ids = [i for group in listed for i in group.replica_ids]
            ids += [i for pair in proto.source_target_pairs for i in (pair.source, pair.target)]
            iota = proto.iota_collective_device_list
            ids.append(iota.num_replica_groups * iota.num_devices_per_group - 1)
            mesh = proto.mesh_axes_replica_group_list.mesh
            size = 1
            for axis in mesh.axes:
                size *= axis.size
            ids.append(size - 1)
            largest = max([largest, *ids])
    return largest + 1


def main(argv: list[str] | None = None) -> int:
    """Print the ledger, or with ``--json`` the schedule as data. Exit code 2 on files it cannot use."""
    parser = argparse.ArgumentParser(prog="python -m stretto.hlo_frontend.overlap")
    parser.add_argument("file", type=Path)
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        module = read_module(arguments.file)
        costs = CostTable.read(arguments.costs)
        plan = plan_module(module, costs, devices_of(module))
    except (StrettoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        json.dump(to_json(plan), sys.stdout)
        print()
        return 0
    entries = ledger(plan)
    for entry in entries:
        where = "".join(f"[{i}]" for i in entry.iteration)
        print(
            f"{entry.seconds * 1e6:10.1f} us  exposed {entry.exposed * 1e6:10.1f} us  "
            f"{entry.stream:12} {entry.name}{where}  {entry.why}"
        )
    for key, value in summary(plan, entries).items():
        print(f"{key:24} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
