"""A dataclass becomes flags of its types, filled from them; nothing is kept between two runs."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from absl.flags import FlagValues
from ml_collections import ConfigDict
import pytest

from lm_jax.console import cli
from lm_jax.console.flags import define_flags, missing_flags
from lm_jax.run.config import from_plain
from lm_jax.run.settings import CommandOptions, Flag, Settings, Shortcut, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base(CommandOptions):
    """Of all.

    Attributes:
      run: work folder of a run.
      seed: random seed of the sampler.
    """

    run: Path
    seed: Annotated[int, at_least(0)] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Of one.

    Attributes:
      text: text to continue.
      file: file of sentences.
      layer: layer of the prototype.
      rate: rate of learning.
      weights: which weights to read.
      controls: measure the controls.
      words: words to rank by.
      edit: prototype to disturb.
      sizes: numbers of heads.
    """

    text: str = ""
    file: Path | None = None
    layer: Annotated[int | None, at_least(0)] = None
    rate: Annotated[float, at_least(0.0)] = 0.5
    weights: Literal["best", "last"] = "best"
    controls: bool = True
    words: tuple[str, ...] = ("a", "b")
    edit: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    sizes: tuple[int, ...] = (1, 2)


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
        "--sizes=3,4",
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
        sizes=(3, 4),
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
        ("--sizes=3,x", "--sizes = ['3', 'x'] holds what is no int; give numbers"),
        ("--weights=first", "value should be one of <best|last>"),
        ("--wieghts=last", "--wieghts is not a flag of this command; did you mean 'weights'?"),
        ("--draw_seed=3", "--draw_seed is not a flag of this command"),
        ("seed=3", "'seed=3' is not a flag; arguments are written --seed=VALUE"),
        ("--words=a --words=b", "--words=b: already defined as ['a']"),
        ("--workdir=", "--workdir is missing"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_exit_2(start, argument, words):
    code, options, lines, _ = start("--run=x", *argument.split(" "))
    assert (code, options, len(lines)) == (2, None, 1)
    assert words in lines[0]


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
        "--sizes=1,2 numbers of heads",
    ):
        assert line in lines
    assert max(map(len, text.splitlines())) <= 100


@dataclasses.dataclass(frozen=True)
class Study(Settings):
    """Of a config file.

    Attributes:
      run: work folder of a run.
      prompts: texts.
      first: first of two numbers.
      second: second of two numbers.
      rate: rate of learning.
    """

    shortcuts: ClassVar = {
        "both": Shortcut("both numbers", lambda text: {"first": int(text), "second": int(text)})
    }

    run: Annotated[str, Flag(required=True)] = ""
    prompts: Annotated[tuple[str, ...], Flag("prompt", repeated=True)] = ()
    first: Annotated[int, Flag(), at_least(1)] = 1
    second: int = 2
    rate: Annotated[float, Flag()] = 0.1


@pytest.fixture
def study(tmp_path, capsys):
    """`study(*flags, **fields)`: exit code, the settings, both streams, with a config file.

    A field that is `...` is not in the file.
    """
    file = tmp_path / "study.py"
    lines = ["from ml_collections import ConfigDict", "def get_config():"]
    values = dataclasses.asdict(Study(run="r")) | {"run": "", "first": 5}

    def call(*argv, **fields):
        said = {name: value for name, value in (values | fields).items() if value is not ...}
        file.write_text("\n".join([*lines, f"    return ConfigDict({said!r})"]), "utf-8")
        made = []

        def main(arguments):
            made.append(from_plain(arguments.config, Study))

        code = cli.run(
            main, ["prog", *argv], config=str(file), config_class=Study, workdir_required=False
        )
        streams = capsys.readouterr()
        return code, made[0] if made else None, streams.err, streams.out

    return call


def test_flags_of_settings_are_written_over_the_config_file(study):
    code, made, _, _ = study("--run=x", "--prompt=a, b", "--prompt=c", "--config.second=7")
    assert (code, made) == (0, Study("x", ("a, b", "c"), 5, 7))


def test_a_required_flag_may_have_a_field_that_stands_for_it():
    @dataclasses.dataclass(frozen=True)
    class Own(Settings):
        models: Annotated[tuple[str, ...], Flag(required=True, unless="model")] = ()
        model: str = ""

    values = FlagValues()
    define_flags(Own, values)
    values(["prog"])
    for fields, lacking in (
        ({}, ["models"]),
        ({"models": (), "model": ""}, ["models"]),
        ({"models": ("a",)}, []),
        ({"models": (), "model": "a"}, []),
        ({"model": "a"}, []),
    ):
        assert list(missing_flags(Own, values, ConfigDict(fields))) == lacking


def test_a_shortcut_sets_fields_and_a_flag_of_one_of_them_wins(study):
    assert study("--run=x", "--both=4")[1] == Study("x", (), 4, 4)
    assert study("--run=x", "--first=3", "--both=4")[1] == Study("x", (), 3, 4)


def test_a_setting_that_is_given_twice_is_refused(study):
    for flags in (("--first=3", "--config.first=4"), ("--config.first", "4", "--first=3")):
        code, _, error, _ = study("--run=x", *flags)
        assert code == 2 and "--first and --config.first are one setting" in error
    assert study("--run=x", "--prompt=a", "--config.prompts=b")[0] == 2
    # A shortcut says less of the field.
    assert study("--run=x", "--config.first=3", "--both=4")[1] == Study("x", (), 3, 4)


def test_a_field_that_the_config_file_leaves_out_has_its_flag(study):
    assert study("--run=x", "--first=3", run=..., first=...)[1] == Study("x", (), 3)
    assert study(run=...)[2] == "error: --run is missing; name the work folder of a run\n"
    code, _, _, text = study("--help", run=..., first=...)
    assert code == 0 and "--first=1 " in text and "--run=<string>" in text
