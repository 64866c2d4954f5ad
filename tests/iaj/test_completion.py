"""Shell completion offers the commands, flags and config names of `--help`."""

import subprocess

import pytest

from iaj import commands, completion
from lm_jax import assets
from lm_jax.console.config_files import shipped_names


@pytest.fixture(scope="module")
def following():
    return completion.candidates()


@pytest.fixture(scope="module")
def complete(following):
    """`complete(*words)`: bash's completions of the last word."""
    source = completion.script(completion._BASH, following)

    def call(*words):
        program = (
            f'{source}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _iaj\n'
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "-c", program, "bash", "iaj", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return call


def test_the_words_of_every_command_are_offered(complete):
    assert complete("") == [*dict.fromkeys(words[0] for words in commands.COMMANDS), "--help"]
    assert complete("po") == ["polyattn"]
    assert complete("protot", "") == [*commands.next_words(("protot",)), "--help"]
    assert complete("sparse", "cho") == ["choices"]


def test_the_flags_are_those_of_the_help(complete, following):
    assert complete("protot", "generate", "--see") == ["--seed="]
    assert complete("protot", "generate", "--prompt", "=", "the", "--tem") == ["--temperature="]
    assert complete("polyattn", "audit", "--config.niah_n") == ["--config.niah_n="]
    assert complete("protot", "intervene", "--nocontr") == ["--nocontrols"]
    assert set(complete("fetch", "smollm2", "")) >= {*assets.entries(), "--verify", "--from"}
    assert "--profile=" in following["protot", "pretrain"]
    assert "--profile=" not in following["protot", "generate"]


def test_config_names_follow_the_flag(complete):
    names = [name for name in shipped_names() if name.startswith("sparse/")]
    assert complete("sparse", "posttrain", "--config", "=", "sparse/") == names
    assert complete("sparse", "posttrain", "--config", "=") == shipped_names()
    # The value of any other flag is completed as a file, or not at all.
    assert complete("sparse", "posttrain", "--workdir", "=", "x") == []


def test_the_script_for_zsh_has_the_same_candidates(following):
    bash, zsh = (
        [
            line
            for line in completion.script(template, following).splitlines()
            if " choices=" in line
        ]
        for template in (completion._BASH, completion._ZSH)
    )
    assert len(bash) == len(following)
    assert bash == zsh


def test_another_shell_is_refused(capsys):
    assert completion.main(["fish"]) == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
