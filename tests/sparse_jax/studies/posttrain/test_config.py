"""Invalid config fields are refused by name, before any model is read."""

import dataclasses
from pathlib import Path
import re

import numpy as np
import pytest

from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError
from lm_jax.run.config import from_plain, to_plain
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.gates.geco import Strength
from sparse_jax.studies.addition.settings import AdditionConfig
from sparse_jax.studies.multiple_choice.settings import MultipleChoiceConfig
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.beginning import allowances
from sparse_jax.studies.posttrain.settings import SMALL_MODEL, PosttrainConfig, smoke

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "configs" / "sparse" / "posttrain.py"
POSTTRAIN = {
    "context": (0, "at least 1"),
    "validation_documents": (0, "at least 1"),
    "batch_size": (0, "at least 1"),
    "accumulate": (0, "at least 1"),
    "steps": (0, "at least 1"),
    "eval_every": (0, "at least 1"),
    "save_every": (0, "at least 1"),
    "slacks": ((-0.1,), "at least 0"),
    "targets": ((3.5, 3.50001), "0.0001 apart"),
    "bias": (float("nan"), "finite"),
    "distill": (-1.0, "at least 0"),
    "open_at_start": (1.0, "at least 0 and below 1"),
    "loss_share": (0.0, "above 0 and at most 1"),
    "relaxed": (-0.1, "at least 0"),
    "bias_rate": (0.0, "above 0"),
    "eps": (0.0, "above 0"),
    "by_rule": (1.5, "from 0 to 1"),
    "temperature": (0.0, "above 0"),
    "learning_rate": (-1.0, "above 0"),
    "warmup": (1.0, "at least 0 and below 1"),
    "weight_decay": (-0.1, "at least 0"),
    "clip_norm": (-1.0, "at least 0"),
    "skip_sigma": (-1.0, "at least 0"),
    "seeds": ((1, 1), "different values"),
    "mesh": ((-1, -1, 1), "one may be -1"),
}
OTHERS = {
    "no bound": ({"slacks": ()}, "config.slacks = () must be one number or more"),
    "a slack over no control": (
        {"slack_over": "control"},
        "config.slack_over = 'control' needs config.control = True",
    ),
    "open gates without biases": (
        {"open_at_start": 0.9},
        "config.open_at_start needs config.learn_bias = True, config.bias = 0",
    ),
    "open gates with a bias": (
        {"open_at_start": 0.9, "learn_bias": True, "bias": 1.0},
        "config.open_at_start needs config.learn_bias = True, config.bias = 0",
    ),
    "a share of weight that is not set": (
        {"opened": "weight"},
        "config.opened = 'weight' needs config.open_at_start above 0",
    ),
    "a relaxed bound that is paired": (
        {"relaxed": 0.1, "paired": True, "control": True, "slack_over": "control"},
        "config.relaxed raises a bound that config.paired replaces",
    ),
    "a rate of no biases": ({"bias_rate": 3.0}, "config.bias_rate = 3.0 needs config.learn_bias"),
    "a divergence without weight": (
        {"constraint": "divergence", "distill": 0.5},
        "config.constraint = 'divergence' needs config.distill = 1 and config.temperature = 1",
    ),
    "a divergence under a loss": (
        {"constraint": "divergence", "targets": (3.0,)},
        "is bounded by config.slacks above 0; give no config.targets",
    ),
    "a divergence of nothing": (
        {"constraint": "divergence", "slacks": (0.0,)},
        "is bounded by config.slacks above 0; give no config.targets",
    ),
    "a divergence with a control": (
        {"constraint": "divergence", "control": True},
        "has its minimum, 0, with every gate open; set config.control = False",
    ),
    "updates that cannot be paired": (
        {"control": True, "slack_over": "control", "paired": True, "skip_sigma": 4.0},
        "config.skip_sigma = 4.0 skips updates, and config.paired compares each with that of the",
    ),
    "no seed": ({"seeds": ()}, "config.seeds = () must be"),
    "seed below 0": ({"seeds": (-1,)}, "config.seeds = (-1,) must be"),
    "mesh of nothing": ({"mesh": (0, 1, 1)}, "config.mesh = (0, 1, 1) must be"),
    "batch that cannot be cut": (
        {"batch_size": 6, "accumulate": 4},
        "config.batch_size = 6 must be a multiple of config.accumulate = 4",
    ),
    "head": ({"heads": ("3",)}, "config.heads has '3'; write layer.head"),
    "splits": (
        {"corpus": CorpusConfig(splits=(1.0, 0.0, 0.0))},
        "config.corpus.splits = (1.0, 0.0, 0.0) must give training and validation a share",
    ),
}


def numbers_of(config):
    """Names of the numeric fields."""
    return {
        field.name
        for field in dataclasses.fields(config)
        if re.search("int|float", str(field.type)) and "Literal" not in str(field.type)
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: value}, f"config.{name} = {value} must be")
            for name, (value, _) in POSTTRAIN.items()
        ),
        *(({name: value}, bound) for name, (value, bound) in POSTTRAIN.items()),
        *OTHERS.values(),
    ],
)
def test_fields_of_post_training_that_do_not_fit(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        PosttrainConfig(**changes)


def test_every_number_of_post_training_is_checked():
    """Every numeric field has a row in the table, so that no new field is forgotten."""
    assert numbers_of(PosttrainConfig) == set(POSTTRAIN)


def test_smoke_keeps_the_characteristics_of_a_recipe():
    config = PosttrainConfig(targets=(2.29, 2.4), batch_size=64, accumulate=4, mesh=(1, 8, 1))
    small = smoke(config)
    assert len(small.targets) == 2 and min(small.targets) > 12
    assert (small.accumulate, small.mesh) == (4, (1, -1, 1))
    assert small.batch_size % (4 * 4) == 0


@pytest.mark.parametrize(("recipe", "batch", "steps"), [("gpt2", 256, 1.2e6), ("olmo7b", 16, 4e5)])
def test_both_recipes_interpret_the_batch_of_table_2_alike(recipe, batch, steps):
    """It is a micro-batch, four of which make an update."""
    config = load_config(str(ROOT / "configs" / "sparse" / f"{recipe}.py"))
    assert (config.batch_size, config.accumulate, config.steps) == (4 * batch, 4, steps)


ADDITION = {
    "num_layers": 1,
    "hidden_size": 0,
    "mlp_size": 0,
    "held_out": 0,
    "batch_size": 0,
    "dense_steps": 0,
    "sparse_steps": 0,
    "dense_rate": 0.0,
    "sparse_rate": -1.0,
    "dense_decay": -1.0,
    "sparse_decay": -1.0,
    "clip_norm": 0.0,
    "strength": 0.0,
    "bound": -1.0,
    "bias": float("inf"),
    "eval_every": 0,
    "seeds": (3, 3),
}


@pytest.mark.parametrize("name", ADDITION)
def test_a_field_of_the_addition_is_refused_by_its_name(name):
    value = ADDITION[name]
    with pytest.raises(UsageError, match=re.escape(f"config.{name} = {value} must be")):
        AdditionConfig(**{name: value})


def test_every_number_of_the_addition_is_checked():
    with pytest.raises(UsageError, match=r"'3\+4' is no problem"):
        AdditionConfig(drawn=("3+4",))
    assert numbers_of(AdditionConfig) == set(ADDITION)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("arc",)}, "config.tasks has 'arc'"),
        ({"tasks": ("arc_easy", "arc_easy")}, "names a task twice"),
        ({"tasks": ()}, "names no task"),
        ({"sparse": ("a", "a")}, "name a model twice"),
        ({"sparse": ("dense",)}, "as the dense model is called"),
        ({"limit": -1}, "config.limit = -1"),
        ({"batch_tokens": 0}, "config.batch_tokens = 0"),
    ],
)
def test_a_field_of_multiple_choice_is_refused_by_its_name(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        MultipleChoiceConfig(**changes)


def test_the_mode_over_dense_is_the_recipe_of_small_models_with_a_control():
    text = CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=600_000)
    expected = STUDY.settings(**SMALL_MODEL, corpus=text, validation_documents=120, control=True)
    assert load_config(f"{CONFIG}:over_dense").to_dict() == expected.to_dict()
    with pytest.raises(UsageError, match="known: divergence, over_dense, paper_gates, smoke"):
        load_config(f"{CONFIG}:large")


# Every recipe for a pretrained model.
RECIPES = {
    *("gpt2", "olmo7b", "llama1b_one_gpu", "smollm2", "smollm2_256", "posttrain", "quickstart"),
    *("gemma3_270m", "smollm2:over_dense", "smollm2:divergence", "stories15m"),
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_starts_with_open_gates(name):
    """With a scaled score: from a raw one, hundreds wide, a bias does not come back.

    Unless edges that carry no weight are closed at first (`test_opening` has what that costs).
    """
    config = from_plain(load_config(f"sparse/{name}"), PosttrainConfig)
    start = config.open_at_start, config.learn_bias, config.raw_gate, config.opened
    on_weight = name == "stories15m"
    assert start == ((0.92, True, True, "weight") if on_weight else (0.999, True, False, "edges"))


def test_no_recipe_for_a_pretrained_model_is_left_out():
    """Besides those that train their own."""
    folder = ROOT / "configs" / "sparse"
    files = [f.stem for f in folder.glob("*.py") if "iaj sparse posttrain" in f.read_text("utf-8")]
    assert set(files) == {name for name in RECIPES if ":" not in name}


@pytest.mark.parametrize("name", ["gpt2:paper", "olmo7b:paper", "smollm2:paper_gates"])
def test_the_gates_of_the_paper_have_a_mode(name):
    config = from_plain(load_config(f"sparse/{name}"), PosttrainConfig)
    assert (config.raw_gate, config.bias, config.open_at_start) == (True, 0.0, 0.0)
    open_gates = from_plain(load_config(f"sparse/{name.partition(':')[0]}"), PosttrainConfig)
    changed = {
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(open_gates, field.name)
    }
    assert changed == {"raw_gate", "learn_bias", "open_at_start", "bias_rate"}


def test_the_rates_of_a_training_are_those_of_its_settings():
    config = PosttrainConfig(
        learn_bias=True, bias_rate=10.0, eps=1e-6, schedule="linear", open_at_start=0.9
    )
    assert config.train.rate_factors == (("gate_bias", 10.0),)
    assert (config.train.eps, config.train.schedule) == (1e-6, "linear")
    assert PosttrainConfig().train.rate_factors == ()


def test_a_relaxed_bound_falls_with_the_learning_rate():
    """A warm-up over 20 of 100 updates, and a line to 0."""
    config = PosttrainConfig(
        relaxed=0.05, learning_rate=2e-3, steps=100, warmup=0.2, schedule="linear"
    )
    k = np.arange(100)
    # The rate begins with 1e-8, not with 0.
    line = np.where(k < 20, 5e-6 + (1 - 5e-6) * k / 20, (100 - k) / 80)
    # Of float32 rates, each of a few operations.
    np.testing.assert_allclose(allowances(config), 0.05 * line, rtol=2.0**-20, atol=0.05 * 2.0**-22)
    assert allowances(PosttrainConfig()) == ()


def test_settings_of_before_have_the_identity_that_they_had():
    """Fields of later versions are left out at their defaults, also within sections."""
    plain = to_plain(PosttrainConfig())
    later = {"constraint", "open_at_start", "opened", "bias_rate", "eps", "schedule"}
    later |= {"loss_share", "relaxed"}
    assert not later & plain.keys() and "proportional" not in plain["strength"]
    changed = PosttrainConfig(strength=Strength(proportional=3.0), eps=1e-6)
    assert to_plain(changed)["strength"]["proportional"] == 3.0
    assert to_plain(changed)["eps"] == 1e-6
    train = to_plain(PosttrainConfig().train)
    assert not {"eps", "rate_factors"} & train.keys()
