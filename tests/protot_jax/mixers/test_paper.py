"""The configs of the paper's tables, against the tables: facts copied here by hand, once.

Prototype Transformer, Table 1, appendix A.2, appendix A.7 (Tables 15 to 20).
"""

import pytest

from lm_jax.console.config_files import load_config
from lm_jax.run.config import from_plain
from lm_jax.train import optim
from lm_jax.train.config import TrainConfig
from protot_jax.training import saved_run, study_config
from protot_jax.training.config import PretrainConfig
from protot_jax.training.search_space import SearchConfig

PROTOT = (1e-3, 2e-3, 3e-3)
LLAMA = (0.8e-3, 1.6e-3, 3.2e-3)
MAMBA = (1.9e-3, 3.8e-3, 7.6e-3)
DELTANET = (3.4e-3, 6.8e-3, 13.6e-3)
PAPER_SEEDS = (234, 124, 325)

ALONE = {"protot": (2e-3,), "llama": (1.6e-3,), "mamba": (3.8e-3,), "deltanet": (6.8e-3,)}
CONTEXTS = (256, 512, 1024, 2048)


def varied(field, perplexities, rates=PROTOT, model="protot", **same):
    """Rows in which one field differs, with the perplexity at each of its values."""
    return [(model, rates, value, {field: own, **same}) for own, value in perplexities.items()]


def by_context(model, *perplexities, **same):
    found = dict(zip(CONTEXTS, perplexities, strict=True))
    return varied("context", found, ALONE[model], model, **same)


# Table: seeds, epochs, the text of its perplexities, and for each row the model, the learning
# rates, the perplexity, and what of the model or its training differs from the defaults.
NOTHING = {"shared_routing": False, "first_temperature": 1.0, "conv_layers": 0}
TABLES = {
    "layer0_routing": (
        (0,),
        3,
        "validation",
        [
            ("protot", (2e-3,), 133.3, {}),
            ("protot", (2e-3,), 133.4, {"shared_routing": False}),
            ("protot", (2e-3,), 133.6, {"first_temperature": 1.0}),
            ("protot", (2e-3,), 145.7, {"conv_layers": 0}),
            ("protot", (2e-3,), 149.9, NOTHING),
        ],
    ),
    "mass_and_rank": (
        PAPER_SEEDS,
        10,
        "validation",
        [
            ("protot", PROTOT, 97.1, {}),
            ("protot", PROTOT, 101.8, {"mass_normalisation": False}),
            ("protot", PROTOT, 97.3, {"low_rank": False}),
        ],
    ),
    "dropout": (
        PAPER_SEEDS,
        10,
        "validation",
        [
            ("protot", PROTOT, 97.1, {}),
            ("protot", PROTOT, 107.6, {"dropout": 0.0}),
            ("llama", LLAMA, 84.8, {}),
            ("llama", LLAMA, 85.2, {"attention_dropout": False}),
            ("llama", LLAMA, 92.4, {"dropout": 0.0}),
            ("mamba", MAMBA, 91.1, {}),
            ("mamba", MAMBA, 96.6, {"dropout": 0.0}),
            ("deltanet", DELTANET, 99.4, {}),
            ("deltanet", DELTANET, 103.5, {"dropout": 0.0}),
        ],
    ),
    "long_context": (
        PAPER_SEEDS,
        10,
        "test",
        [
            *by_context("protot", 90.5, 84.8, 80.5, 81.9),
            *by_context("llama", 78.7, 70.4, 65.3, 63.6),
            *by_context("mamba", 86.0, 78.0, 70.5, 69.5),
            *by_context("deltanet", 90.4, 76.3, 70.6, 68.9),
        ],
    ),
    "context_variants": (
        PAPER_SEEDS,
        10,
        "test",
        [
            *by_context("protot", 97.2, 82.0, 73.7, 73.0, hidden_size=512),
            *by_context("protot", 109.6, 79.8, 74.6, 76.7, num_layers=12),
            *by_context("protot", 94.0, 83.2, 79.1, 80.5, num_prototypes=64),
        ],
    ),
}
for name, field, perplexities in (
    ("kernel_size", "conv_kernel", {4: 98.3, 5: 97.1, 6: 96.9, 7: 97.5}),
    ("alpha", "alpha", {0.0: 99.2, 0.5: 97.9, 0.8: 97.0, 1.0: 97.1, 1.2: 98.7}),
    ("num_prototypes", "num_prototypes", {16: 98.5, 32: 97.1, 64: 97.3}),
):
    TABLES[name] = (PAPER_SEEDS, 10, "validation", varied(field, perplexities))
# In the asset `wiki`.
INTRODUCTIONS = 66_555
# The default column of Table 1: 18,000 examples of 256 tokens, validated on 4,000.
DEFAULTS = {
    "hidden_size": 256,
    "num_layers": 6,
    "context": 256,
    "tie_embeddings": True,
    "arithmetic": "exact",
    "examples": "truncate",
    "train_documents": 18_000,
    "validation_documents": 4_000,
    "test_documents": 0,
    "batch_size": 32,
    "epochs": 10,
    "max_steps": 0,
    "learning_rate": 2e-3,
    "warmup": 0.02,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "clip_norm": 0.0,
    "skip_sigma": 0.0,
    "dropout": 0.1,
    "attention_dropout": True,
    "accumulate": 1,
    "dtype": "bfloat16",
    "weights_dtype": "float32",
    "eval_every": 0,
    "early_stop": True,
    "seeds": PAPER_SEEDS,
}
PROTOTYPES = {
    "num_prototypes": 32,
    "low_rank": True,
    "conv_kernel": 5,
    "conv_layers": 2,
    "shared_routing": True,
    "first_temperature": 3.0,
    "temperature": 1.0,
    "alpha": 1.0,
    "decay": 0.9,
    "mass_normalisation": True,
}


def load(name, kind, mode=""):
    return from_plain(load_config(f"configs/protot/{name}.py{mode}"), kind)


def check_run(own, changed):
    """Every field of a run is the paper's default, or what is said to differ."""
    unknown = changed.keys() - DEFAULTS.keys() - PROTOTYPES.keys()
    assert unknown <= {"model"}
    for name, value in DEFAULTS.items():
        assert getattr(own, name) == changed.get(name, value), name
    for name, value in PROTOTYPES.items():
        assert getattr(own.prototypes, name) == changed.get(name, value), name
    assert (own.corpus.vocab_size, own.model) == (16_000, changed.get("model", "protot"))
    # Introductions of Wikipedia articles, enough of them but where all there are suffice.
    assert (own.corpus.source, own.corpus.unit) == ("wiki", "document")
    for share, split in zip(own.corpus.splits, ("train", "validation"), strict=False):
        limit = getattr(own, f"{split}_documents")
        assert limit in (0, 20_000) or limit < 0.95 * share * INTRODUCTIONS


@pytest.mark.parametrize("name", TABLES)
def test_a_study_is_the_table_of_the_paper(name):
    seeds, epochs, split, rows = TABLES[name]
    table = load(name, study_config.StudyConfig)
    assert table.paper_split == split
    assert len(table.variants) == len(rows)
    for variant, (model, rates, perplexity, changed) in zip(table.variants, rows, strict=True):
        assert variant.paper == perplexity
        results = [own for _, own in study_config.each_run(table, variant)]
        assert tuple(own.learning_rate for own in results) == rates
        for own in results:
            shared = {"seeds": seeds, "epochs": epochs, "learning_rate": own.learning_rate}
            check_run(own, shared | {"model": model} | changed)
            cfg, _ = saved_run.model(own, own.corpus.vocab_size)
            width = changed.get("hidden_size", 256)
            assert (cfg.num_layers, cfg.hidden_size) == (changed.get("num_layers", 6), width)
            mlp_size = 0 if model == "mamba" else {256: 688, 512: 1376}[width]
            assert (cfg.mlp_size, cfg.max_length) == (mlp_size, own.context)


# Of the released configuration of the context sweep, where the ablations have 3e-3 for ProtoT.
SWEEP = {
    "protot": (1e-3, 2e-3, 4e-3),
    "llama": (0.8e-3, 1.6e-3, 3.2e-3),
    "mamba": (1.9e-3, 3.8e-3, 7.6e-3),
    "deltanet": (3.4e-3, 6.8e-3, 13.6e-3),
}


def runs_of(mode):
    """The runs of the context sweep by model and context, each with its own of the paper."""
    table, plain = (load("long_context", study_config.StudyConfig, m) for m in (mode, ""))
    results = {}
    for variant, original in zip(table.variants, plain.variants, strict=True):
        assert (variant.name, variant.paper) == (original.name, original.paper)
        own = [own for _, own in study_config.each_run(table, variant)]
        results[own[0].model, own[0].context] = own
    assert len(results) == 16
    return results


def test_the_grid_of_the_context_sweep_is_that_of_its_released_configuration():
    for (model, _), runs in runs_of(":grid").items():
        assert tuple(own.learning_rate for own in runs) == SWEEP[model]


def test_the_scaled_rates_grow_with_the_root_of_the_context():
    # Appendix A.2; four times the context doubles the rate.
    factors = {256: (1,), 512: (1, 2**0.5), 1024: (1, 2), 2048: (1, 8**0.5)}
    for (model, context), runs in runs_of(":scaled").items():
        wanted = [SWEEP[model][1] * factor for factor in factors[context]]
        assert [own.learning_rate for own in runs] == pytest.approx(wanted, rel=1e-15)


def test_the_unscheduled_sweep_has_one_rate_from_the_first_step_to_the_last():
    for (model, context), (own,) in runs_of(":unscheduled").items():
        changed = {"model": model, "context": context, "learning_rate": SWEEP[model][1]}
        check_run(own, changed | {"schedule": "constant", "warmup": 0.0})
        flat, falling = (
            optim.schedule(TrainConfig(100, own.learning_rate, warmup=warmup, schedule=schedule))
            for warmup, schedule in ((own.warmup, own.schedule), (0.02, "cosine"))
        )
        for step in (0, 1, 50, 99):
            assert flat(step) == pytest.approx(own.learning_rate, rel=1e-6)
        assert falling(0) < 1e-7 and falling(99) < 0.2 * own.learning_rate


# Layers, width, MLP, vocabulary, prototypes, context: Table 1, section 4 and the released code.
SIZES = {
    "default": (6, 256, 688, 16_000, 32, 256),
    "large_scale": (12, 512, 1376, 16_000, 32, 512),
    # Ours, of the paper's shape on a smaller vocabulary, and small ones.
    "sotu_2h": (6, 256, 688, 8_000, 32, 256),
    "wiki_2h": (6, 256, 688, 8_000, 32, 256),
    "quickstart": (4, 128, 336, 4_000, 16, 128),
    "arithmetic": (4, 64, 160, 2_000, 16, 256),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_run_builds_a_model_of_this_size(name):
    own = load(name, PretrainConfig)
    cfg, mixer = saved_run.model(own, own.corpus.vocab_size)
    result = (cfg.num_layers, cfg.hidden_size, cfg.mlp_size, cfg.vocab_size)
    assert (*result, mixer.num_prototypes, cfg.max_length) == SIZES[name]


def test_the_default_run_is_the_default_column_of_table_1():
    check_run(load("default", PretrainConfig), {})


def test_the_large_run_is_the_last_column_of_table_1():
    changed = {"hidden_size": 512, "num_layers": 12, "context": 512}
    # All 338,695 documents of the training split.
    changed |= {"train_documents": 0, "validation_documents": 20_000}
    check_run(load("large_scale", PretrainConfig), changed)
    mamba = {"model": "mamba", "learning_rate": 2.3e-3}
    check_run(load("large_scale", PretrainConfig, ":mamba"), changed | mamba)


@pytest.mark.parametrize(
    ("model", "rate"), [("llama", 1.6e-3), ("mamba", 3.8e-3), ("deltanet", 6.8e-3)]
)
def test_a_baseline_has_its_own_learning_rate(model, rate):
    check_run(load("default", PretrainConfig, f":{model}"), {"model": model, "learning_rate": rate})


def test_the_search_is_that_of_section_4():
    config = load("search", SearchConfig)
    assert config.learning_rate == (3e-5, 3e-2)
    assert config.batch_sizes == (32, 64, 128)
    assert (config.trials, config.random_trials, config.sampler) == (50, 15, "botorch")
    assert (config.choices, config.most_flops) == ((), 0.0)
    check_run(config.base, {})
