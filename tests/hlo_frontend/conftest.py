"""Eight virtual CPU devices, this folder's helpers importable by name, and no op without a row unnoticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.hlo_frontend import ops

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
sys.path.insert(0, str(Path(__file__).parent))

MADE_UP = "made-up"  # the opcode of tests that want one without a row


class _Asked(dict[str, ops.Op]):
    """The table of ops, which remembers the opcodes that it has no row for."""

    def __init__(self) -> None:
        super().__init__(ops.OPS)
        self.missing: set[str] = set()

    def get(self, opcode: str, default: ops.Op) -> ops.Op:  # type: ignore[override]
        if opcode not in self:
            self.missing.add(opcode)
        return super().get(opcode, default)


@pytest.fixture(autouse=True)
def every_op_has_a_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in whose program an op has no row in the table of ops."""
    asked = _Asked()
    monkeypatch.setattr(ops, "OPS", asked)
    yield
    assert asked.missing <= {MADE_UP}
