"""Prints the shell completion script of commands, flags and config names.

    iaj completion bash > ~/.local/share/bash-completion/completions/iaj
    iaj completion zsh > ~/.zfunc/_iaj        with ~/.zfunc in fpath, before compinit

The flags are those in `--help` of each command, including the fields of its config. Write the file
again after an update: the script does not run Python.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import io
import re
import sys
import warnings

from iaj import commands
from iaj.commands import COMMANDS, next_words
from iaj.parser import Parser, run_parsed
from lm_jax import assets
from lm_jax.assets import published
from lm_jax.console.config_files import shipped_names

_FLAG = re.compile(r"^  (?:-h, )?--(\[no\])?([\w.-]+)(=)?", re.MULTILINE)
# Commands with names as arguments, besides flags.
_NAMES = {
    ("fetch",): lambda: [*assets.entries(), *published.names()],
    ("completion",): lambda: ("bash", "zsh"),
}

_BASH = """\
# Completion of iaj in bash, written by: iaj completion bash
_iaj() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" choices
    # Bash splits --config=NAME at the equals sign.
    if [[ $current == "=" ]]; then before="=" current=""; fi
    if [[ $before == "=" ]]; then
        if [[ "${{COMP_WORDS[*]}}" == *--config\\ =* ]]; then
            COMPREPLY=($(compgen -W "{configs}" -- "$current"))
        fi
        return
    fi
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
    if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _iaj iaj
"""
_ZSH = """\
#compdef iaj
# Completion of iaj in zsh, written by: iaj completion zsh
_iaj() {{
    local choices
    local -a list
    if compset -P '--config='; then compadd -- {configs}; return; fi
    if compset -P '--*='; then _files; return; fi
    case "${{(j: :)words[2,CURRENT-1]}}" in
{cases}
    esac
    # An array, because a pattern is matched before a string is split.
    list=(${{=choices}})
    compadd -S '' -- ${{(M)list:#*=}}
    compadd -- ${{list:#*=}} || _files
}}
_iaj "$@"
"""


def flags_of(words: tuple[str, ...]) -> list[str]:
    """The flags in the help of a command, with `=` where a value follows."""
    output = io.StringIO()
    argv = sys.argv
    sys.argv = ["iaj", "--help"]
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.suppress(SystemExit),
            warnings.catch_warnings(),
        ):
            # An earlier command may have imported this module, of which runpy warns.
            warnings.simplefilter("ignore", RuntimeWarning)
            commands.run(COMMANDS[words])
    finally:
        sys.argv = argv
    flags = []
    for negated, name, value in _FLAG.findall(output.getvalue()):
        flags += [f"--{name}{value}"] + [f"--no{name}"] * bool(negated)
    return list(dict.fromkeys([*flags, "--help"]))


def candidates() -> dict[tuple[str, ...], list[str]]:
    """Words that can follow each prefix of a command line."""
    prefixes = dict.fromkeys([(), *(words[:1] for words in COMMANDS if len(words) > 1)])
    result = {words: [*next_words(words), "--help"] for words in prefixes}
    for words in COMMANDS:
        names = list(_NAMES[words]()) if words in _NAMES else []
        result[words] = names + (["--help"] if words == ("completion",) else flags_of(words))
    return result


def script(template: str, candidates: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """Completion script of a shell, from its template."""
    cases = []
    for words, follow in candidates.items():
        # Other arguments may precede the word at the cursor.
        pattern = f'"{" ".join(words)}"' + "*" * (words in COMMANDS)
        cases.append(f'        {pattern}) choices="{" ".join(follow)}" ;;')
    # A pattern with a star comes after those that it would also match.
    cases.sort(key=lambda case: "*)" in case)
    return template.format(configs=" ".join(shipped_names()), cases="\n".join(cases))


def run(arguments: argparse.Namespace) -> None:
    """Prints the script."""
    print(script({"bash": _BASH, "zsh": _ZSH}[arguments.shell], candidates()), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser("iaj completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell of the script")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
