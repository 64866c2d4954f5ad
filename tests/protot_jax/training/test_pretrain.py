"""Pretraining as a command: on synthetic text, for every model, started and resumed."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

import lm_jax
from lm_jax.checkpoint import manager
from lm_jax.checkpoint.folder import MANIFEST
from lm_jax.errors import CorruptError, UsageError
from lm_jax.model.flops import forward_flops
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.run.workdir import FINISHED_FILE
from lm_jax.study import frame
from lm_jax.text.examples import Batches, Examples
from lm_jax.text.tokenizer_training import END_OF_TEXT
from lm_jax.train import optim, step
from lm_jax.weights.card import CARD
from protot_jax.mixers import models
from protot_jax.studies.pretraining import numbers, report
from protot_jax.training import pretrain, results, saved_run
from protot_jax.training.config import PretrainConfig
from tests.protot_jax.small_runs import command, settings

# Run by `make test-all`.
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "protot")) for name in models.MODELS],
)
def test_every_model_trains_and_reports_its_sample_sizes(name, text, tmp_path, capsys):
    command(settings(text, model=name), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    (seed,) = summary["seeds"]
    assert seed["steps"] == 4
    # An untrained model has the perplexity of its vocabulary size.
    assert 1.0 < seed["last"]["validation_perplexity"] < 1.3 * 60
    assert summary["unigram_perplexity"] < 30
    model = saved_run.load_run(tmp_path / "run")
    assert summary["forward_flops_per_example"] == forward_flops(model.cfg, model.mixer, 32).total
    assert summary["corpus"]["splits"]["train"]["documents"] > 60
    printed = capsys.readouterr().out
    assert f"{summary['parameters']:,} parameters" in printed
    examples = f"{summary['corpus']['training_examples']:,} examples"
    assert f"{seed['tokens_seen']:,} tokens seen ({examples} per epoch), 1 seed" in printed
    command(settings(text, model=name), tmp_path / "run")
    assert "finished 20" in capsys.readouterr().out


def test_training_learns_and_seeds_differ(text, tmp_path):
    config = settings(text, max_steps=60, epochs=9, eval_every=60, dtype="float32", seeds=(1, 2))
    config.update({"learning_rate": 1e-2, "dropout": 0.0})
    command(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    first, second = (each["best"]["validation_perplexity"] for each in summary["seeds"])
    card = (tmp_path / "run" / CARD).read_text("utf-8")
    assert f"| validation perplexity, best weights | {(first + second) / 2:.2f} " in card
    assert "| seeds | 1, 2 |" in card and str(tmp_path) not in card
    assert max(first, second) < summary["unigram_perplexity"]
    assert first != second


def test_fields_that_keep_a_run_alive_reach_the_loop(text, tmp_path):
    """The losses that spikes are compared with are stored; a damaged checkpoint can be passed."""
    config, folder = settings(text, skip_sigma=4.0), tmp_path / "run"
    command(config, folder)
    saved = saved_run.seed_folder(folder, 234) / manager.FOLDER
    newest = manager.step_folder(saved, 4)
    manifest = json.loads((newest / MANIFEST).read_text("utf-8"))
    assert manifest["arrays"]["losses_W"]["shape"] == [step.LOSS_WINDOW]
    (newest / MANIFEST).write_text("{}")
    (folder / FINISHED_FILE).unlink()
    with pytest.raises(
        CorruptError, match=r"give --config\.allow_fallback to continue from step_0*2"
    ):
        command(config, folder)
    config.update({"allow_fallback": True, "mesh": (1, -1, 1)})
    command(config, folder)
    assert manager.saved_steps(saved) == [2, 4]


def test_a_run_trains_on_as_many_documents_as_configured(text, tmp_path):
    """An epoch is over those alone, and a checkpoint is bound to the limit."""
    limits = {"train_documents": 20, "validation_documents": 5, "test_documents": 3}
    # Three epochs of two batches of eight; the rest of 20 belongs to the next.
    config = settings(text, max_steps=0, epochs=3, eval_every=6, **limits)
    command(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["seeds"][0]["steps"] == 6
    used = {"train": 20, "validation": 5, "test": 3}
    assert summary["corpus"]["documents_used"] == used
    assert summary["corpus"]["training_examples"] == 20
    assert summary["corpus"]["splits"]["train"]["documents"] > 60
    frozen = from_plain(config, PretrainConfig)
    data = saved_run.load_data(frozen, tmp_path / "run" / "data")
    documents = np.concatenate(
        [Batches(data.train, batch_size=8).at(k)["document"] for k in range(5)]
    )
    assert sorted(documents.tolist()) == sorted([*range(20), *range(20)])
    whole = saved_run.load_data(
        dataclasses.replace(frozen, train_documents=0), tmp_path / "run" / "data"
    )
    fingerprints = {Batches(each.train, batch_size=8).fingerprint for each in (data, whole)}
    assert len(fingerprints) == 2 and whole.train.documents > 60
    checkpoints_of = saved_run.seed_folder(tmp_path / "run", 234)
    assert "limit=20" in (next(checkpoints_of.rglob("MANIFEST.json"))).read_text("utf-8")
    with pytest.raises(UsageError, match="train_documents = -1 must be at least 0"):
        PretrainConfig(train_documents=-1)


def test_a_split_with_fewer_documents_than_its_limit_is_named_once(text, tmp_path, caplog):
    limits = {"train_documents": 1_000, "validation_documents": 5, "test_documents": 2_000}
    config = from_plain(settings(text, **limits), PretrainConfig)
    data = saved_run.load_data(config, tmp_path / "data")
    wanted = [
        f"the {name} split has {split.documents} documents, fewer than config.{name}_documents = "
        f"{limit}; all are used"
        for name, split, limit in (("train", data.train, "1,000"), ("test", data.test, "2,000"))
    ]
    assert [one.getMessage() for one in caplog.records if "fewer" in one.getMessage()] == wanted


@pytest.mark.parametrize("layout", ["truncate", "pack", "join"])
def test_unigram_perplexity_is_that_of_the_counted_targets(layout, text, tmp_path):
    config = from_plain(settings(text, examples=layout), PretrainConfig)
    data = saved_run.load_data(config, tmp_path / "data")
    tokenizer = data.prepared.tokenizer
    end = tokenizer.backend.token_to_id(END_OF_TEXT)

    def targets(examples: Examples):
        rows = examples.read(np.arange(examples.count))["tokens"]
        pairs = [pair for row in rows.tolist() for pair in itertools.pairwise(row)]
        # The end of a packed document predicts nothing.
        ends = (end,) if layout == "pack" else ()
        return [token for before, token in pairs if token and before not in ends]

    counts = dict.fromkeys(range(1, tokenizer.vocab_size), 1)
    for token in targets(data.train):
        counts[token] += 1
    total = sum(counts.values())
    evaluated = targets(data.validation)
    want = math.exp(-sum(math.log(counts[token] / total) for token in evaluated) / len(evaluated))
    make_batch = saved_run.batch_maker(config, tokenizer)
    result = numbers.unigram_perplexity(data.train, data.validation, make_batch)
    assert result == pytest.approx(want)


@pytest.mark.parametrize("name", models.MODELS)
def test_groups_of_weight_decay(name):
    """Table E20: matrices alone, and neither prototypes nor what makes Mamba's steps."""
    config = PretrainConfig(model=name, hidden_size=32, num_layers=2)
    cfg, mixer = saved_run.model(config, 100)
    chosen = optim.choose(pretrain.decays, lm_jax.param_spec(cfg, mixer))
    kept = {path for path, decayed in chosen.items() if not decayed}
    norms = {"final/scale", "blocks/ln1/scale"} | ({"blocks/ln2/scale"} if cfg.mlp_size else set())
    own = {
        "protot": {"prototypes", "decay_logit", "alpha", "write_tau", "read_tau"},
        "llama": set(),
        "mamba": {"A_log", "D", "step_up", "step_bias", "conv_bias"},
        "deltanet": {"norm/scale"},
        "gated_deltanet": {"norm/scale", "A_log", "step_bias"},
        "gated_slots": {"norm/scale"},
        "raven": {"norm/scale", "q_norm/scale", "k_norm/scale", "A_log", "step_bias"},
    }[name.removesuffix("_ffn")]
    assert kept == norms | {f"blocks/mixer/{each}" for each in own}


def test_the_terminal_shows_the_best_weights_with_an_interval_over_seeds(run):
    stored = load_result(run / frame.SUMMARY, results.PretrainSummary)

    def printed(*perplexities):
        """Of best and last weights of each seed: step, validation and test perplexity."""
        seeds = (
            dataclasses.replace(
                stored.seeds[0],
                seed=seed,
                best=results.CheckpointPerplexity(*best),
                last=results.CheckpointPerplexity(*last),
            )
            for seed, (best, last) in enumerate(perplexities)
        )
        summary = dataclasses.replace(stored, unigram_perplexity=36.0, seeds=tuple(seeds))
        return "\n".join(report.format_summary(summary))

    pairs = [((2, 11.0, 14.0), (4, 13.0, 15.0)), ((4, 12.0, 13.0),) * 2, ((4, 13.0, 12.0),) * 2]
    text = printed(*pairs)
    # Student: 12 or 13 -+ 4.3027 x 1 / sqrt(3), and 12.67 -+ 4.3027 x 0.5774 / sqrt(3).
    best = "validation perplexity 12.00 (95 % 9.52 to 14.48, seeds 11.00 to 13.00, n = 3)"
    assert best in text
    assert "test 13.00 (95 % 10.52 to 15.48, seeds 12.00 to 14.00, n = 3)" in text
    assert "unigram model 36.0, 3.00 times" in text
    last = "validation 12.67 (95 % 11.23 to 14.10, seeds 12.00 to 13.00, n = 3)"
    assert f"of the last weights: {last}" in text and "3 seeds" in text
    alike = printed(((4, 12.0, 13.0),) * 2)
    assert "of the last weights" not in alike
    assert "validation perplexity 12.00 (one run)" in alike and "1 seed" in alike
