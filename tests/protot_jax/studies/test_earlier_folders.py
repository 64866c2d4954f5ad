"""Summaries of folders that were finished before their studies had the frame.

They were made by the commands of that version from runs of `tests.protot_jax.small_runs`.
"""

import json
from pathlib import Path

import pytest

from lm_jax.run.workdir import config_changes
from lm_jax.study import frame
from protot_jax.studies import interventions, judging, perturbations, robustness

FOLDERS = Path(__file__).parents[2] / "golden" / "studies"
EARLIER = {
    "protot_intervene": (interventions.STUDY, "comparison.json", "other"),
    "protot_intervene/place": (interventions.STUDY, "intervention.json", "write zeroed"),
    "protot_judge": (judging.STUDY, "summary.json", "null:coin, sampled: no ratings"),
    "protot_perturb": (perturbations.STUDY, "benchmark.json", "stand in training text; CC0"),
    "protot_robustness": (robustness.STUDY, "summary.json", "punctuation"),
}


@pytest.mark.parametrize("name", EARLIER)
def test_its_summary_is_read_and_shown(name):
    study, file, printed = EARLIER[name]
    folder = FOLDERS / name
    summary = frame.load_summary(study, folder)
    assert summary.schema == json.loads((folder / file).read_text("utf-8"))["schema"]
    built = study.function("report")(study.config(), summary, folder)
    assert built.sections() and printed in "\n".join(built.lines)


@pytest.mark.parametrize("name", EARLIER)
def test_it_is_no_folder_of_these_settings(name):
    """The command says how they differ, and measures nothing into it."""
    study, *_ = EARLIER[name]
    assert any("absent" in phrase for phrase in config_changes(FOLDERS / name, study.config()))
