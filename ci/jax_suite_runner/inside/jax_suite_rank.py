"""Runs one of JAX's files for several processes as a rank that mpiexec started.

Arguments: folder of the logs, address of `jax.distributed`'s coordinator, the file, options for absl. The
file is told that it is a worker of JAX's launcher.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    folder, coordinator, file, *options = sys.argv[1:]
    rank = os.environ["PMI_RANK"]
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(f"{folder}/jax_{rank}_{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, descriptor)
        os.close(log)
    worker = [f"--multiprocess_test_worker_id={rank}"]
    worker += [f"--multiprocess_test_controller_address={coordinator}", "--logtostderr"]
    sys.argv = [file, *options, *worker]
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
