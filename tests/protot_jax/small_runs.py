"""Pretraining runs of seconds, on synthetic text, and runs that were not trained."""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from lm_jax.checkpoint import manager
from lm_jax.model.decoder import param_spec
from lm_jax.model.params import abstract
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import write_json
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.study import frame
from lm_jax.train import loop
from lm_jax.train.state import TrainState
from protot_jax.studies.pretraining import STUDY
from protot_jax.training.config import PretrainConfig, experiment
from protot_jax.training.saved_run import DATA, load_data, model, seed_folder

TEMPERATURES = ("write_tau", "read_tau")
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


def save_untrained(config, folder):
    """What pretraining leaves that a reader wants, with parameters that numpy drew.

    Compiling their initialisation, or a training step, would take longer than all that is tested
    here. Decays are drawn too, for those of a new model are all alike.
    """
    frozen = from_plain(config, PretrainConfig)
    folder.mkdir()
    write_json(folder / CONFIG_FILE, to_plain(config))
    data = load_data(frozen, folder / DATA)
    cfg, mixer = model(frozen, data.prepared.tokenizer.vocab_size)
    identity = manager.Identity({}, "none", {}, {})
    for seed in frozen.seeds:
        rng = np.random.default_rng(seed)
        params = jax.tree.map(
            lambda leaf, rng=rng: jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), jnp.float32),
            abstract(param_spec(cfg, mixer)),
        )
        # Near 0 it would open one gate and shut all others.
        mixing = params["blocks"]["mixer"]
        mixing |= {tau: jnp.ones(cfg.num_layers) for tau in TEMPERATURES if tau in mixing}
        manager.save(
            seed_folder(folder, seed) / manager.FOLDER,
            TrainState(jnp.int32(4), params, (), None),
            identity=identity,
            progress={},
            keep=1,
            best=None,
        )
    return folder
