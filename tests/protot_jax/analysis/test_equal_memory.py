"""Models of the recall suite carry equally many floats, counted in the caches they decode with."""

import dataclasses

import jax
import pytest

import lm_jax
from lm_jax.errors import UsageError
from protot_jax.analysis.equal_memory import matched_model, state_size
from protot_jax.mixers.models import MODELS
from protot_jax.studies.recall.settings import RecallConfig

SHAPE = {
    "hidden_size": 64,
    "num_layers": 2,
    "vocab_size": 40,
    "context": 64,
    "tie_embeddings": False,
}
RECURRENT = [name for name in MODELS if name != "llama"]


@pytest.mark.parametrize("name", RECURRENT)
def test_the_cache_of_a_matched_model_has_the_floats_that_are_stated(name):
    cfg, mixer = matched_model(name, 1024, **SHAPE)
    size = state_size(cfg, mixer)
    assert size.memory == 1024
    # At any length.
    for length in (4, 100_000):
        cache = lm_jax.init_cache(cfg, 1, length, mixer=mixer).layers
        assert sum(x.size for x in jax.tree.leaves(cache)) == 2 * (size.memory + size.other)
    # Inputs of convolutions of four taps or five, and one mass for each of 32 prototypes.
    other = {
        "protot": 32 + 4 * 32,
        "mamba": 3 * 128,
        "mamba_ffn": 3 * 128,
        "deltanet": 3 * 3 * 64,
        "gated_deltanet": 3 * 3 * 64,
    }
    assert size.other == other.get(name, 0)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_memory_of_the_paper_s_size_fits_every_model(name):
    cfg, mixer = RecallConfig().model(name)
    assert state_size(cfg, mixer).memory == 4096


def test_attention_carries_keys_and_values_of_every_token():
    cfg, mixer = matched_model("llama", 1024, **SHAPE)
    assert [state_size(cfg, mixer, length).memory for length in (1, 50)] == [128, 6400]


@pytest.mark.parametrize(
    ("name", "memory", "words"),
    [
        ("protot", 1000, "has 32 floats for each of its num_prototypes; choose a multiple of 32"),
        ("mamba", 64, "has 128 floats for each of its state_size"),
        ("deltanet", 1000, r"has config.hidden_size\^2 / heads floats.* choose 1024"),
    ],
)
def test_a_memory_that_no_size_gives_is_refused(name, memory, words):
    with pytest.raises(UsageError, match=f"config.memory = {memory}: {name} {words}"):
        matched_model(name, memory, **SHAPE)


def test_settings_are_refused_together_with_their_remedy():
    with pytest.raises(UsageError) as caught:
        RecallConfig(steps=0, seeds=(1, 1), tasks=("mqr",), models=())
    for words in ("config.steps = 0", "config.seeds = (1, 1)", "'mqr'; did you mean 'mqar'"):
        assert words in str(caught.value)
    assert "config.models = () must be one or more different names" in str(caught.value)
    with pytest.raises(UsageError, match="no room for the task mqar; raise it, or choose fewer"):
        dataclasses.replace(RecallConfig(), train_length=8, tasks=("mqar",))
