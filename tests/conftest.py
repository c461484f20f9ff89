"""Makes ``support`` and ``programs``, the packages that several tests share, importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
