"""Pretraining runs of seconds, on synthetic text."""

import dataclasses

from ml_collections import ConfigDict
import numpy as np
import pytest

from lm_jax.study import frame
from lm_jax.train import loop
from protot_jax.studies.pretraining import STUDY
from protot_jax.training.config import experiment

WORDS = ("the", "house", "of", "a", "river", "and", "its", "people", "who", "met", "in", "town")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of documents with random sentences over a small vocabulary."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for i in range(120):
        sentences = (" ".join(rng.choice(WORDS, 12)) for _ in range(6))
        (folder / f"{i:03}.txt").write_text("\n".join(sentences), "utf-8")
    return folder


@pytest.fixture(scope="session")
def run(text, tmp_path_factory):
    """Two seeds of two layers and three prototypes; the best checkpoint of seed 2 is its first.

    Constants added to the evaluations decide which is best: in so small a run, rounding would.
    """
    folder = tmp_path_factory.mktemp("run") / "run"
    config = settings(text, dtype="float32", seeds=(1, 2))
    config.prototypes.num_prototypes = 3
    config.update({"learning_rate": 0.5, "dropout": 0.0})
    # Of steps 2 and 4 of seed 1, then of seed 2.
    added = iter((9.0, 0.0, 0.0, 9.0))

    def evaluate(*args, **kwargs):
        result = loop_evaluate(*args, **kwargs)
        return dataclasses.replace(result, loss=result.loss + next(added))

    loop_evaluate = loop.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", evaluate)
        command(config, folder)
    return folder


def settings(text, **changed) -> ConfigDict:
    config = experiment("smoke", early_stop=False)
    config.corpus.update(
        {"source": str(text), "unit": "document", "vocab_size": 60, "splits": (0.7, 0.15, 0.15)}
    )
    config.update({"max_steps": 4, "eval_every": 2, "batch_size": 8, **changed})
    return config


def command(config, folder):
    """Runs as the command line does, with a config object."""
    return frame.execute(STUDY, config, folder)
