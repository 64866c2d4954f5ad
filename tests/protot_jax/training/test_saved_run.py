"""Names of runs in reports: variants of a study, kinds of models, folders where both are equal."""

import json
from pathlib import Path

import pytest

from lm_jax.errors import UsageError
from lm_jax.run.workdir import CONFIG_FILE
import protot_jax
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.training.saved_run import run_names


@pytest.fixture(scope="module")
def models(run):
    return [protot_jax.load_run(run, seed=seed) for seed in (1, 2)]


@pytest.fixture
def study(tmp_path):
    """The folder of a study of two variants, without runs."""
    variants = [{"name": "taps_4"}, {"name": "taps_5"}]
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"variants": variants}), "utf-8")
    return tmp_path


def test_a_run_is_named_by_its_variant_or_its_model(study, models):
    first, second = models
    folders = [study / "taps_4" / "lr_0.002", study / "taps_5" / "lr_0.002", Path("runs/other")]
    assert run_names(folders, [first] * 3) == ["taps_4", "taps_5", "protot"]
    # Seeds tell two models of one name apart.
    assert run_names(folders[:1] * 2, [first, second]) == ["taps_4", "taps_4"]
    # A folder beside the variants is none of them, nor is one below a config of another kind.
    assert run_names([study / "data" / "lr_0.002"], [first]) == ["protot"]
    for other in ([1], {"variants": ["taps_4"]}):
        (study / CONFIG_FILE).write_text(json.dumps(other), "utf-8")
        assert run_names(folders[:1], [first]) == ["protot"]


def test_names_and_seeds_are_unique(study, models):
    first, _ = models
    rates = [study / "taps_4" / f"lr_{rate}" for rate in (0.002, 0.004)]
    assert run_names(rates, [first] * 2) == ["taps_4 (lr_0.002)", "taps_4 (lr_0.004)"]
    same = [study / place / "mine" for place in ("a", "b")]
    assert run_names(same, [first] * 2) == [f"protot ({place})" for place in same]


def test_errors_and_fine_tunings_have_the_name_of_the_variant(study):
    folder = study / "taps_4" / "lr_0.002"
    assert list(GlueConfig(runs=(str(folder),)).named_runs()) == ["taps_4"]
    with pytest.raises(UsageError, match="two are called 'taps_4'; write NAME=FOLDER"):
        GlueConfig(runs=(str(folder), str(folder.with_name("lr_0.004")))).named_runs()
