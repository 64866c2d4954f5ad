"""Argument parser of the commands with positional arguments and no config."""

import argparse
from collections.abc import Callable, Sequence
import sys
from typing import NoReturn

from lm_jax.console import output
from lm_jax.console.usage import examples_first
from lm_jax.errors import EXIT_INTERRUPTED, EXIT_UNREAD, UsageError, UserError


class Parser(argparse.ArgumentParser):
    """A parser whose help opens with a docstring's examples and whose errors are `UsageError`s."""

    def __init__(self, prog: str, docstring: str | None) -> None:
        super().__init__(prog=prog, allow_abbrev=False)
        self._docstring = docstring

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        return f"{examples_first(self._docstring)}\n\n{super().format_help()}"


def run_parsed(
    action: Callable[[argparse.Namespace], int | None],
    parser: Parser,
    argv: Sequence[str] | None,
) -> int:
    """Runs `action` on the parsed arguments; prints a `UserError` and returns its exit code.

    Ctrl-C is one, with the code of a command that SIGINT ended. Where nobody reads the output any
    more, nothing is printed.
    """
    try:
        code = action(parser.parse_args(argv)) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if output.reader_is_gone():
            return EXIT_UNREAD
        raise
