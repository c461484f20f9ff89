"""Shared memory that MPI leaves behind in a job that fails.

MPICH removes the names of its segments in ``MPI_Finalize``, to which a failed job does not come: each would
keep a MiB a rank of the host's memory for good.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_NAMES = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_\d+$", re.MULTILINE)


def remove_names() -> None:
    """Remove the names of MPICH's segments that this process has mapped. They stay until they are unmapped
    everywhere; MPI cannot be ended in order any more."""
    with contextlib.suppress(OSError):  # no such list, and no such names, but on Linux
        for path in set(_NAMES.findall(Path("/proc/self/maps").read_text())):
            with contextlib.suppress(OSError):  # another rank was faster
                os.unlink(path)
