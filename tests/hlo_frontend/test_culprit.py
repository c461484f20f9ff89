"""Which instruction XLA ended the process on. XLA's own mistakes come and go: these ends are staged."""

from __future__ import annotations

import gzip
import os
import signal
from types import SimpleNamespace

import pytest
from jaxlib import _hlo, _jax

from stretto.hlo_frontend import culprit
from stretto.hlo_frontend.schema import HloModuleProto
from stretto.hlo_frontend.source import in_fork
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.errors import InvalidProgramError

LINES = [f"  x{i} = f32[{i + 2}] broadcast(f32[] one), dimensions={{}}" for i in range(9)]
TEXT = "\n".join(
    [
        "HloModule m",
        "inner {",
        "  a = f32[4] parameter(0)",
        "  ROOT b = f32[4] negate(a)",
        "}",
        "ENTRY e {",
        "  p = f32[4] parameter(0)",
        "  one = f32[] constant(1)",
        *LINES,
        "  ROOT r = f32[4] call(p), to_apply=inner",
        "}",
        "",
    ]
)


def end() -> None:
    """End the process, as XLA does by other signals."""
    os.kill(os.getpid(), signal.SIGKILL)


def ends_parser(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def parse(text: str) -> object:
        if at in text:
            end()
        return _hlo.hlo_module_from_text(text)

    monkeypatch.setattr(culprit, "_hlo", SimpleNamespace(hlo_module_from_text=parse))


def ends_exporter(monkeypatch: pytest.MonkeyPatch, opcode: str) -> None:
    def write(module: bytes) -> bytes:
        found = HloModuleProto.FromString(module)
        if any(i.opcode == opcode for c in found.computations for i in c.instructions):
            end()
        return _jax.mlir.hlo_to_stablehlo(module)

    mlir = SimpleNamespace(hlo_to_stablehlo=write)
    monkeypatch.setattr(culprit, "_jax", SimpleNamespace(mlir=mlir))


@pytest.mark.thorough
@pytest.mark.parametrize(("at", "name"), [("f32[7]", "x5"), ("f32[10]", "x8"), ("one =", "one")])
def test_an_instruction_that_ends_the_parser(monkeypatch, at, name) -> None:
    ends_parser(monkeypatch, at)
    found = culprit.in_text(TEXT)
    assert found is not None
    assert found.startswith(f"{name} ({name} = ")
    with pytest.raises(InvalidProgramError, match=rf"^{name} \(.*XLA ended with SIGKILL"):
        in_fork(end, gzip.compress(TEXT.encode()))


def test_an_instruction_inside_of_a_computation_that_ends_the_exporter(monkeypatch) -> None:
    ends_exporter(monkeypatch, "negate")
    assert culprit.in_text(TEXT) is None
    assert culprit.in_module(parse_hlo_text(TEXT)) == "b (negate)"
    for data in (TEXT.encode(), parse_hlo_text(TEXT)):
        with pytest.raises(InvalidProgramError, match=r"^b \(negate\): XLA ended with SIGKILL"):
            in_fork(end, data)


def test_where_no_instruction_does_it_by_itself() -> None:
    assert culprit.in_text(TEXT) is None
    assert culprit.in_module(parse_hlo_text(TEXT)) is None
    with pytest.raises(InvalidProgramError, match="the module contradicts itself"):
        in_fork(end, TEXT.encode())
