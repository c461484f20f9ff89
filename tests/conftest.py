"""What all tests share: importable helpers, and JAX with stretto as a second platform in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

from stretto.hlo_frontend import pipeline
from stretto.runtime import options

# ``support`` and ``programs`` are packages that several tests share.
sys.path.insert(0, str(Path(__file__).parent))

# Ranks write to one pipe: where this is set, Python writes a line and its end separately, and the launcher
# passes on another rank's line between them.
os.environ.pop("PYTHONUNBUFFERED", None)

# Graphs are checked between passes, in child processes too.
os.environ[pipeline.CHECKED] = "1"

# Before any test module is imported: one that makes an array while it is collected makes JAX's devices,
# and then it is too late. The CPU stays the default platform.
jax.config.update("jax_platforms", "cpu,stretto")
options.configure(options.Options(local_devices=4))
