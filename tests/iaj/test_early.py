"""What is refused before JAX is imported, by the front of the commands."""

import json

import pytest

from iaj import __main__ as front
from iaj import commands, early, quickstart
from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.user_cache import CACHE_VARIABLE
from sparse_jax.studies.graphs import prompts

CIRCUITS = ("sparse", "circuits")


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """A machine without assets, and a folder without runs."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def model(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_missing_assets_are_named_at_once(tmp_path):
    with pytest.raises(BadInputError) as caught:
        early.check(("polyattn", "check"), ["--model=smollm2"])
    assert str(caught.value) == (
        "assets smollm2 and wiki are not in the cache; run: iaj fetch smollm2 wiki"
    )
    own = model(tmp_path / "own", max_position_embeddings=512)
    early.check(("polyattn", "check"), [f"--model={own}", "--diagnose", "--text", str(own)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dense=runs/none"], "--dense=runs/none: there is no such folder or .gguf file"),
        (["--dense", "smolm2"], "did you mean 'smollm2'"),
        (["--dense", "pair_192_dens"], "did you mean 'pair_192_dense'"),
        (["--dense=OWN", "--sparse=none"], "--sparse=none: there is no such folder"),
        (["--dense=OWN", "--task=ioi,mine.jsonl"], "--task=mine.jsonl: there is no such file"),
        (["--dense=smollm2"], "asset smollm2 is not in the cache; run: iaj fetch smollm2"),
        ([], "asset smollm2 is not in the cache"),
        (["--config=sparse/circuits:smoke"], "asset smollm2 is not in the cache"),
    ],
)
def test_what_is_not_there_is_named_with_its_flag(tmp_path, flags, message):
    own = model(tmp_path / "own")
    with pytest.raises(BadInputError, match=message):
        early.check(CIRCUITS, [flag.replace("OWN", str(own)) for flag in flags])


def test_nothing_is_said_of_what_the_command_line_does_not_decide(tmp_path):
    early.check(CIRCUITS, ["--config=mine.py"])
    early.check(CIRCUITS, ["--pair=models/pair_small"])
    early.check(CIRCUITS, ["--dense=org/name", "--download"])
    early.check(("sparse", "posttrain"), ["--config.model=x/y", "--download", "--config=a.py"])
    early.check(("quickstart",), [])
    early.check(("protot", "concepts"), ["--run=protot_small"])
    early.check(CIRCUITS, ["--dense=pair_192/dense"])
    own = model(tmp_path / "own")
    for name in (prompts.FINDINGS, prompts.REPHRASINGS):
        with pytest.raises(BadInputError, match="asset wiki is not"):
            early.check(("sparse", "graph"), [f"--model={own}", f"--prompts={name}"])


def test_of_a_flag_that_is_given_again_the_last_one_counts(tmp_path):
    own = model(tmp_path / "own", max_position_embeddings=512)
    last = [f"--model={own}", "--length=99", f"--haystack={own}"]
    early.check(("polyattn", "check"), ["--model=/none", "--length=999", *last])
    with pytest.raises(BadInputError, match="--model=/none"):
        early.check(("polyattn", "check"), [*last, "--model=/none"])


@pytest.mark.parametrize("name", published.names())
def test_names_of_published_models_and_of_their_parts_are_left_to_the_study(name):
    early.check(CIRCUITS, [f"--dense={name}", "--task=copy"])


@pytest.mark.parametrize("steps", [quickstart.STEPS, quickstart.TRAINING_STEPS])
def test_no_step_of_quickstart_is_refused_with_the_assets_that_it_fetches(
    steps, tmp_path, monkeypatch
):
    fetched: set[str] = set()
    monkeypatch.setattr(early.assets, "cached", lambda name: tmp_path if name in fetched else None)
    monkeypatch.setattr(early, "_check_place", lambda *place, **options: None)
    monkeypatch.setattr(early, "_check_lengths", lambda *lengths: None)
    for step in steps:
        fetched |= set(step.assets)
        words = step.words()
        early.check(words[:2], words[2:])


def test_a_run_that_has_begun_is_left_to_its_study(tmp_path):
    """It may have finished, and be shown though its model is gone."""
    folder = model(tmp_path / "run")
    early.check(CIRCUITS, ["--dense=/none", f"--workdir={folder}"])
    (tmp_path / "runs" / "check" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "check" / "one" / "finished.json").touch()
    early.check(("polyattn", "check"), ["--model=/none"])
    with pytest.raises(BadInputError, match="--model=/none"):
        early.check(("polyattn", "check"), ["--model=/none", "--workdir=new"])


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_length_beyond_the_model_names_both_flags(tmp_path, name):
    own, given = model(tmp_path / "own", **{name: 1024}), ["--haystack", str(tmp_path / "own")]
    check = ("polyattn", "check")
    with pytest.raises(UsageError) as caught:
        early.check(check, [f"--model={own}", "--length=1025", *given])
    assert str(caught.value) == (
        f"--length=1025 is longer than the 1,024 positions of --model={own}; give at most 1024"
    )
    early.check(check, [f"--model={own}", "--length=1024", *given])


def test_the_command_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["iaj", *CIRCUITS, "--dense=/no/such", "--workdir=new"])
    monkeypatch.setattr(commands, "run", lambda _: pytest.fail("was imported"))
    assert front.main() == BadInputError.exit_code
    assert capsys.readouterr().err.startswith("error: --dense=/no/such: there is no such folder")
