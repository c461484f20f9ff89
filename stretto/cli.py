"""The `stretto` command. Each subcommand is one file of `stretto.commands`."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# name -> what it does. The module stretto.commands.<name> has `add_arguments(parser)` and
# `run(arguments) -> exit code`; it is imported only when it is asked for.
COMMANDS = {
    "run": "run an HLO module (text or serialized) on local devices or under mpirun",
    "explain": "print what an HLO module communicates, in which order and why, without running it",
    "bench": "measure what collectives and compute cost on these machines, and keep the table",
    "trace": "show what a job wrote with STRETTO_TRACE: a Perfetto trace, a page, what was exposed",
    "conform": "try whether an engine keeps what stretto and JAX programs rely on",
    "doctor": "say what is installed and in force, run one all-reduce, and tell what to do",
}

# Of a stream; an error of a file that was opened names it.
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns its exit code. Raises ``SystemExit(2)`` on arguments it cannot read.

    Whoever reads what is printed may stop reading, or have no room for it; what a terminal cannot show
    becomes ``?``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            result = _main(sys.argv[1:] if argv is None else argv)
        except SystemExit:
            if sys.stdout is not None:
                sys.stdout.flush()
            raise
        if sys.stdout is not None:
            sys.stdout.flush()
        return result
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        # Python writes what is left when it ends: there it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"stretto: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Its help that cannot be written is an error; argparse ignores that."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)


def _main(argv: list[str]) -> int:
    # XLA tells of its devices on stderr otherwise; importing jax sets the same.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    parser = _Parser(prog="stretto", description="A collective runtime for JAX on any engine.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            import_module(f"stretto.commands.{name}").add_arguments(subparser)
    arguments = parser.parse_args(argv)
    if arguments.version:
        import stretto

        print(stretto.__version__)
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    result: int = import_module(f"stretto.commands.{arguments.command}").run(arguments)
    return result


if __name__ == "__main__":
    sys.exit(main())
