"""One run that the tests of concept reports share, and another of a model without prototypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.checkpoint import manager
from lm_jax.model.decoder import param_spec
from lm_jax.model.params import abstract
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import write_json
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.train.state import TrainState
from protot_jax.training.config import PretrainConfig
from protot_jax.training.saved_run import DATA, load_data, model, seed_folder
from tests.protot_jax import small_runs

TEMPERATURES = ("write_tau", "read_tau")


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


@pytest.fixture(scope="session")
def run(text, tmp_path_factory):
    """A run of two seeds with 2 layers of 4 prototypes."""
    config = small_runs.settings(text, dtype="float32", seeds=(1, 2))
    config.prototypes.num_prototypes = 4
    return save_untrained(config, tmp_path_factory.mktemp("concepts") / "run")


@pytest.fixture(scope="session")
def attention_run(text, tmp_path_factory):
    """A run of a model that has no prototypes."""
    config = small_runs.settings(text, model="llama", seeds=(1,))
    return save_untrained(config, tmp_path_factory.mktemp("attention") / "run")
