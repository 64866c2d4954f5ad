"""Runs a command of this distribution: `iaj protot generate --run=runs/speeches`.

The words name a module (`iaj.commands`): a study, which `lm_jax.study` runs, or one that runs as
`python -m MODULE` with the remaining arguments. No other command is imported. Readers of runs
(`iaj.run_readers`) are registered here alone.
"""

from collections.abc import Sequence
import sys

from iaj import commands

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_HELP, _HELP_ALL = {"--help", "-h", "-?"}, "--help-all"


def main() -> int:
    """Runs the command that `sys.argv` names; returns the exit code unless the command exits."""
    words: tuple[str, ...] = ()
    rest = sys.argv[1:]
    while words not in commands.COMMANDS:
        if not rest or rest[0] in ("--help", "-h", "-?", "help"):
            print(commands.help_text(words), file=sys.stdout if rest else sys.stderr)
            return 0 if rest else _EXIT_USAGE
        if rest[0] == "--version" and not words:
            return _version()
        if rest[0] not in commands.next_words(words):
            return _unknown(words, rest[0])
        words, rest = (*words, rest[0]), rest[1:]
    return _run(words, rest)


def _run(words: tuple[str, ...], rest: Sequence[str]) -> int:
    # The stored text, since the command would be imported first, and jax with it.
    if not _HELP.isdisjoint(rest) and (stored := commands.help_file(words)).is_file():
        print(stored.read_text("utf-8"), end="")
        return 0
    rest = ["--help" if word == _HELP_ALL else word for word in rest]
    sys.argv = [f"iaj {' '.join(words)}", *rest]
    try:
        if "--help" not in rest and (refused := _refused_early(words, rest)):
            return refused
        if words[0] in ("sparse", "polyattn"):
            # They may name a run of another library, which they do not import.
            from iaj import run_readers

            run_readers.register_all()
        return commands.run(commands.COMMANDS[words])
    except KeyboardInterrupt:
        # During the imports of the command, which handles signals itself once it runs.
        print("error: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _refused_early(words: tuple[str, ...], rest: Sequence[str]) -> int:
    """The exit code of what is refused before the command is imported, and JAX with it; or 0."""
    from iaj import early
    from lm_jax.errors import UserError

    try:
        early.check(words, rest)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0


def _version() -> int:
    from importlib import metadata

    print(f"interpretable-attention-jax {metadata.version('interpretable-attention-jax')}")
    return 0


def _unknown(words: tuple[str, ...], word: str) -> int:
    from lm_jax.errors import nearest

    known = commands.next_words(words)
    command = " ".join(("iaj", *words, word))
    print(f"error: {command} is not a command{nearest(word, known)}", file=sys.stderr)
    return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
