"""Runs the tests of one of JAX's files for several processes as a rank that mpiexec started.

Arguments: folder of the logs, the file, options for absl. What such a file's ``main`` would do through
`jax.distributed` is left out: the ranks find each other over MPI.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def main() -> None:
    folder, file, *options = sys.argv[1:]
    rank = os.environ["PMI_RANK"]
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(f"{folder}/jax_{rank}_{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, descriptor)
        os.close(log)

    from absl.testing import absltest
    from jax._src import test_multiprocess
    from jax._src import test_util as jtu
    from jax._src.config import config

    def run_tests(shard_main: Any = None) -> None:
        config.config_with_absl()
        absltest.main(testLoader=jtu.JaxTestLoader())

    test_multiprocess.main = run_tests
    sys.argv = [file, *options]
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
