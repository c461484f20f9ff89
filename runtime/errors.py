"""Errors that users see. Each docstring says who should catch it."""

from __future__ import annotations


class StrettoError(RuntimeError):
    """Base of all errors raised by stretto. ``code`` is the PJRT (absl) status name it becomes in JAX."""

    code = "INTERNAL"


class UnsupportedError(StrettoError):
    """An HLO op, form or dtype that stretto does not run. Not worth catching: the program must change."""

    code = "UNIMPLEMENTED"


class InvalidProgramError(StrettoError):
    """The program contradicts itself or its devices (groups, counts, shapes). Not worth catching."""

    code = "INVALID_ARGUMENT"


class CompileError(StrettoError):
    """The engine refused a segment. Not worth catching."""

    code = "INTERNAL"


class WorldError(StrettoError):
    """The ranks cannot work together: no MPI, other versions, other device counts. Catch to report."""

    code = "FAILED_PRECONDITION"


class CollectiveTimeout(StrettoError):
    """A collective was not reached by every rank in time. The job cannot go on; catch to report."""

    code = "DEADLINE_EXCEEDED"


class RankFailed(StrettoError):
    """Another rank raised or died. The job cannot go on; catch to report."""

    code = "ABORTED"


class CollectiveMismatch(StrettoError):
    """The ranks' programs do not communicate the same things, or in contradictory orders. Catch to report.

    JAX raises its own ``JaxRuntimeError`` for it, as for all errors, whose message has this class's name.

    ``agreed``: every process of the program raises it and none waits, so that the job can go on without
    the program.
    """

    code = "FAILED_PRECONDITION"
    agreed = False
