"""HLO text to proto, by the parser in jaxlib. It checks syntax and shapes, not what ops mean."""

from __future__ import annotations

from jaxlib import _hlo

from stretto.runtime.errors import InvalidProgramError


def parse_hlo_text(text: str) -> bytes:
    """Serialized ``HloModuleProto`` of HLO text. Raises `InvalidProgramError` with XLA's reason."""
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        raise InvalidProgramError(f"cannot parse HLO text: {error}") from error
