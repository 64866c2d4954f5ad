"""Invalid settings are refused before weights are read, and leave the work folder free."""

import shutil

import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import write_json
from lm_jax.run.finished import mark_finished
from lm_jax.run.workdir import LOG_FILE
from lm_jax.study import frame
from lm_jax.weights import load
from sparse_jax.studies.posttrain.task import DATA
from tests.sparse_jax.small_runs import command, settings
from tests.sparse_jax.studies.posttrain.test_results import summary

REFUSED = {
    "no such model": (
        {"model": "smollm"},
        BadInputError,
        r"is no folder or \.gguf file.*'smollm2'",
    ),
    "no such corpus": ({"corpus": {"source": "wikis"}}, BadInputError, "corpus 'wikis' is not"),
    "more context than positions": ({"context": 33}, UsageError, "beyond the 32 positions"),
    "no such head": ({"heads": ("0.1", "2.0")}, UsageError, "heads has 2.0, .* layers 0 to 1"),
    "no such weight": (
        {"adapters": {"targets": ("gates",)}},
        UsageError,
        "no weight matches 'gates'.*gate",
    ),
    "a batch that does not divide": ({"batch_size": 6}, UsageError, "make it a multiple of 4"),
}


class ReadError(Exception):
    """Weights were read."""


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    def load_params(*args, **kwargs):
        raise ReadError

    monkeypatch.setattr(load, "load_params", load_params)


def check_free(base, text, folder):
    """A valid command in the same folder gets as far as reading the weights."""
    with pytest.raises(ReadError):
        command(settings(base, text), folder)


def test_an_invalid_setting_claims_no_folder(base, text, tmp_path):
    for case, (changes, error, message) in REFUSED.items():
        config = settings(base, text)
        config.update(changes)
        with pytest.raises(error, match=message):
            command(config, tmp_path / "run")
        left = [item.name for item in (tmp_path / "run").glob("[!.]*")]
        assert left in ([], [LOG_FILE]), case
    mute = shutil.copytree(base, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(BadInputError, match="mute' has no tokenizer; put its"):
        command(settings(mute, text), tmp_path / "run")
    check_free(base, text, tmp_path / "run")


def test_a_batch_larger_than_the_corpus_is_refused_before_weights_are_read(base, text, tmp_path):
    with pytest.raises(BadInputError, match="fewer than one batch"):
        command(settings(base, text, batch_size=4096), tmp_path / "run")


def test_prepared_data_are_used_where_the_corpus_is_missing(base, text, tmp_path):
    source = shutil.copytree(text, tmp_path / "text")
    check_free(base, source, tmp_path / "run")
    shutil.rmtree(source)
    check_free(base, source, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / DATA)
    with pytest.raises(BadInputError, match="is not there; give sotu"):
        command(settings(base, source), tmp_path / "run")


def test_a_finished_run_is_shown_without_its_model(base, text, tmp_path, capsys):
    folder, model = tmp_path / "run", shutil.copytree(base, tmp_path / "model")
    check_free(model, text, folder)
    write_json(folder / frame.SUMMARY, summary())
    mark_finished(folder, {"model": "a" * 64})
    shutil.rmtree(model)
    command(settings(model, text), folder)
    out, err = capsys.readouterr()
    assert "2 seeds: 30.00 % of edges open" in out
    assert "model cannot be compared, being no longer there" in err
    with pytest.raises(BadInputError, match=r"is no folder or \.gguf file"):
        command(settings(model, text), folder, resume="force")
