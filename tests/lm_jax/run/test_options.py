"""A dataclass becomes flags of its types, filled from them; nothing is kept between two runs."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from lm_jax.run import cli
from lm_jax.run.options import option, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    run: Path = required("work folder of a run")
    seed: int = option(0, "random seed of the sampler", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Base):
    text: str = option("", "text to continue")
    file: Path | None = option(None, "file of sentences")
    layer: int | None = option(None, "layer of the prototype", least=0)
    rate: float = option(0.5, "rate of learning", least=0.0)
    weights: Literal["best", "last"] = option("best", "which weights to read")
    controls: bool = option(True, "measure the controls")
    words: tuple[str, ...] = option(("a", "b"), "words to rank by")
    edit: tuple[str, ...] = option((), "prototype to disturb", repeated=True)


@pytest.fixture
def start(capsys):
    """`start(*flags)`: exit code, the options that the command got, lines of both streams."""

    def call(*argv, options=Options):
        parsed = []

        def main(arguments):
            parsed.append(arguments.options)

        code = cli.run(main, ["prog", *argv], options=options, workdir_required=False)
        streams = capsys.readouterr()
        return code, parsed[0] if parsed else None, streams.err.splitlines(), streams.out

    return call


def test_flags_fill_the_fields_in_their_types(start):
    code, options, _, _ = start(
        "--run=runs/x", "--seed=3", "--text=the people", "--file", "a.tsv", "--layer=2", "--rate=2",
        "--weights=last", "--nocontrols", "--words=war,peace", "--edit=L1P2", "--edit=L0P1,x",
    )  # fmt: skip
    assert code == 0
    assert options == Options(
        run=Path("runs/x"),
        seed=3,
        text="the people",
        file=Path("a.tsv"),
        layer=2,
        rate=2.0,
        weights="last",
        controls=False,
        words=("war", "peace"),
        edit=("L1P2", "L0P1,x"),
    )
    assert isinstance(options.rate, float)


def test_a_second_run_gets_the_defaults_again(start):
    first = start("--run=x", "--seed=3", "--edit=L1P2", "--words=", "--layer=1")[1]
    assert (first.seed, first.edit, first.words, first.layer) == (3, ("L1P2",), (), 1)
    assert start("--run=x")[1] == Options(run=Path("x"))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--run=", "--run is missing; name the work folder of a run"),
        ("--seed=-1", "--seed=-1"),
        ("--seed=1.5", "--seed=1.5"),
        ("--layer=-1", "--layer=-1"),
        ("--rate=-0.5", "--rate=-0.5"),
        ("--rate=fast", "--rate=fast"),
        ("--weights=first", "value should be one of <best|last>"),
        ("--wieghts=last", "--wieghts is not a flag of this command; did you mean 'weights'?"),
        ("--draw_seed=3", "--draw_seed is not a flag of this command"),
        ("seed=3", "'seed=3' is not a flag; arguments are written --seed=VALUE"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_exit_2(start, argument, words):
    code, options, lines, _ = start("--run=x", argument)
    assert (code, options, len(lines)) == (2, None, 1)
    assert words in lines[0]


def test_a_required_option_is_asked_for(start):
    code, _, lines, _ = start()
    assert (code, lines) == (2, ["error: --run is missing; name the work folder of a run"])


def test_help_says_name_default_meaning_and_choices(start):
    code, options, _, text = start("--help")
    assert (code, options) == (0, None)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "--run=<string> work folder of a run",
        "--seed=0 random seed of the sampler",
        "--layer=<int> layer of the prototype",
        "--weights=best which weights to read; one of best, last",
        "--[no]controls measure the controls (default: yes)",
        "--words=a,b words to rank by",
        "--edit= prototype to disturb; repeat this option to specify a list of values",
    ):
        assert line in lines
    assert max(map(len, text.splitlines())) <= 100


def test_two_commands_may_have_an_option_of_one_name(start):
    @dataclasses.dataclass(frozen=True)
    class Other:
        seed: str = option("x", "name of the seed")

    assert start("--seed=abc", options=Other)[1] == Other("abc")
    assert start("--run=x", "--seed=7")[1].seed == 7


def test_a_type_that_no_flag_has_is_a_fault(start):
    @dataclasses.dataclass(frozen=True)
    class Wrong:
        sizes: dict[str, int] = option(None, "sizes by name")

    code, _, lines, _ = start(options=Wrong)
    assert code == 1
    assert lines[-1].startswith("error: TypeError: sizes is annotated dict[str, int]")
