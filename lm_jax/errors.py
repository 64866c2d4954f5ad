"""Errors that a user can act on, each with the exit code of its kind.

A command turns a `UserError` into one line on standard error (what, where, what to do) and its exit
code; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Iterable, Mapping
import difflib
import functools

EXIT_FINISHED = 0
EXIT_NO_GO = 10
EXIT_UNDECIDED = 11
EXIT_INTERRUPTED = 130
# Of a program that SIGPIPE ends, as a shell has it.
EXIT_UNREAD = 141


class UserError(Exception):
    """An error whose message is one sentence that names the field and the remedy."""

    exit_code = 1


class UsageError(UserError, ValueError):
    """A flag, config field or argument that cannot be used."""

    exit_code = 2


class BadInputError(UserError, ValueError):
    """A model, tokenizer, prompt or data file that cannot be used."""

    exit_code = 3


class DivergedError(UserError, ArithmeticError):
    """A run whose loss or state is no longer finite."""

    exit_code = 4


class StorageError(UserError, OSError):
    """A write that failed: disk full, no permission, a missing folder."""

    exit_code = 5


class WorkdirInUseError(UserError, RuntimeError):
    """A work folder that another process holds."""

    exit_code = 6


class CorruptError(UserError, RuntimeError):
    """A stored result or checkpoint that does not match its manifest."""

    exit_code = 7


class ElsewhereError(UserError, RuntimeError):
    """An error of process 0, raised in the other processes of a run with its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("process 0 ended with an error; its own message says what to do")
        self.exit_code = exit_code


class StoppedError(UserError, RuntimeError):
    """A run that was asked to stop and has saved its state."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the closest of `known`, or the sorted list of them."""
    known = sorted(known)
    return closest(name, known) or f"; known: {', '.join(known)}"


def closest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the closest of `known`, nothing where none is close."""
    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def out_of_range(
    config: object, wanted: Mapping[str, tuple[bool, str]], *, prefix: str = ""
) -> list[str]:
    """The fields of a config that cannot be used, each as a phrase with its value and the remedy.

    Args:
      config: a config; its fields and those of nested configs are named as in `wanted`:
        "text.seed".
      wanted: whether each field holds, and what it must be ("at least 1").
      prefix: text before each name in the phrases.
    """
    return [
        f"{prefix}{name} = {functools.reduce(getattr, name.split('.'), config)!r} must be {what}"
        for name, (holds, what) in wanted.items()
        if not holds
    ]
