"""The pair end to end: its text, the two phases of pretraining, shared controls, resuming."""

from collections import Counter
import dataclasses
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, StoppedError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run import stop
from lm_jax.run.config import from_plain
from lm_jax.study import frame
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.prepared import open_prepared
from lm_jax.train import loop
from lm_jax.train.config import Plateau
from lm_jax.train.evaluate import evaluate
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, ignore_index_batch
from lm_jax.train.step import make_eval_step
from lm_jax.weights.card import CARD
import sparse_jax
from sparse_jax.circuits.generators import GENERATORS
from sparse_jax.studies.pair import STUDY, corpus, dense
from sparse_jax.studies.pair import run as pair_run
from sparse_jax.studies.pair.folders import model_folders
from sparse_jax.studies.pair.report_text import format_summary
from sparse_jax.studies.pair.settings import PairConfig, TextConfig
from sparse_jax.studies.posttrain import training
from sparse_jax.studies.posttrain.task import CONTROL, open_task
from tests.sparse_jax.small_runs import write_text

# Run by `make test-all`.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("source") / "text")


@pytest.fixture(scope="module")
def config(source):
    smoke = from_plain(STUDY.settings("smoke"), PairConfig)
    return dataclasses.replace(
        smoke,
        text=dataclasses.replace(smoke.text, source=str(source), vocab_size=400),
        variants=("sparse", "teacher"),
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, start(config, folder)


def start(config, folder):
    """Runs or resumes the pair of a config."""
    return frame.execute(STUDY, config, folder)


def rows(folder, name):
    return [json.loads(line) for line in (folder / pair_run.TEXT / name).read_text().splitlines()]


def test_both_texts_have_the_stated_share_of_prompts_and_nothing_in_common(whole, config):
    texts, documents = [], 0
    for name in (corpus.PRETRAIN, corpus.POSTTRAIN):
        table = rows(whole[0], name)
        several = [row for row in table if "task" in row]
        assert all(len(row["prompts"]) == config.text.prompts_per_document for row in several)
        assert all("\n".join(row["prompts"]) == row["text"] for row in several)
        # Rounded to a whole number of prompts.
        assert abs(len(several) - config.text.task_share * len(table)) <= 1
        counts = Counter(row["task"] for row in several)
        assert set(counts) <= {*config.text.tasks}
        assert max(counts.values()) - min(counts[task] for task in config.text.tasks) <= 1
        texts += [row["text"] for row in table]
        documents += len(table) - len(several)
    assert len(set(texts)) == len(texts) and documents == 150


def test_a_prompt_is_a_clean_prompt_with_a_right_continuation():
    prompts = corpus.prompts("greater_than", seed=3)
    for _ in range(20):
        text = next(prompts)
        first, last = (int(word[-4:]) for word in text.split() if word[-4:].isdigit())
        assert first // 100 == last // 100 and last > first


def test_a_task_without_more_prompts_is_refused(monkeypatch, source, tmp_path):
    example = GENERATORS["copy"].draw(np.random.default_rng(0))
    one = dataclasses.replace(GENERATORS["copy"], draw=lambda rng: example)
    monkeypatch.setitem(GENERATORS, "copy", one)
    text = TextConfig(source=str(source), tasks=("copy",))
    with pytest.raises(BadInputError, match=r"task copy has no more than about 1 .*task_share"):
        corpus.write_corpora(text, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_exported_model_has_the_loss_of_the_last_evaluation(whole, config):
    folder, summary = whole
    prepared = open_prepared(folder / pair_run.DATA)
    model = lm_jax.load_pretrained(model_folders(folder)["dense"])
    assert model.tokenizer.sha256 == prepared.tokenizer.sha256
    mesh = sharding.make_mesh(data=-1)
    held_out = Examples(prepared, "validation", context=config.context, mode="window")
    objective = LanguageModelling(model.cfg, make_batch=ignore_index_batch)
    result = evaluate(
        make_eval_step(objective, mesh), model.params, OnePass(held_out, batch_size=8), mesh
    )
    # The same program on the same numbers.
    assert result.loss == summary.dense.cooldown.loss
    assert summary.dense.plateau.steps == config.dense.most_steps
    assert not summary.dense.reached_plateau
    card = (model_folders(folder)["dense"] / CARD).read_text("utf-8")
    assert f"| held-out loss, nats per token | {result.loss:.4g} |" in card
    assert "| plateau reached | no |" in card and "| text | text, and prompts as" in card


def test_the_second_phase_reads_the_batches_after_the_first(whole, config):
    folder, _ = whole
    examples = Examples(
        open_prepared(folder / pair_run.DATA), "train", context=config.context, mode="window"
    )
    batches = Batches(examples, batch_size=8, seed=0)
    following = dense.Following(batches, skip=4)
    for k in range(3):
        np.testing.assert_array_equal(following.at(k)["tokens"], batches.at(4 + k)["tokens"])
    assert following.fingerprint != batches.fingerprint


def test_a_plateau_ends_the_first_phase(whole, config, tmp_path):
    pretraining = dataclasses.replace(
        config.dense, plateau=Plateau(min_gain=99.0, patience=1), most_steps=100, warmup_steps=1
    )
    ended = dataclasses.replace(config, dense=pretraining)
    prepared, mesh = open_prepared(whole[0] / pair_run.DATA), sharding.make_mesh(data=-1)
    result = dense.train_dense(ended, prepared, tmp_path / pair_run.DENSE, mesh)
    assert result.reached_plateau
    # The second evaluation is the first that can be compared.
    assert result.plateau.steps == 2 * config.dense.eval_every
    assert result.cooldown.steps == config.dense.cooldown_steps


def test_variants_share_one_control_and_its_bound(whole):
    folder, summary = whole
    plain, teacher = summary.variants
    control = summary.controls[0].loss.estimate
    for variant in (plain, teacher):
        (run,) = variant.runs
        assert run.target == control + 15.0
        over = run.over_control
        assert over is not None
        # Sums of the same windows in another order.
        assert over.estimate == pytest.approx(run.loss.estimate - control, abs=1e-9)
    assert not list((folder / "teacher").glob("seed_*/control"))
    text = format_summary(summary)
    assert "no plateau yet" in text and "teacher: " in text and "between 1 seeds" not in text


def test_each_update_is_bounded_by_that_of_the_control(whole, config, tmp_path, monkeypatch):
    folder, _ = whole
    work = tmp_path / "sparse"
    shutil.copytree(folder / "sparse", work)
    task = open_task(pair_run.posttrain_config(config, folder, "sparse"), work)
    control = work / "seed_0" / CONTROL
    loss = json.loads((control / "result.json").read_text())["loss"]["estimate"]
    trained = []

    def train_once(task, folder, objective, seed, bias):
        trained.append(objective)
        raise StoppedError("before the first update")

    monkeypatch.setattr(training, "train_once", train_once)
    with pytest.raises(StoppedError):
        training.train_target(task, 0, loss + 0.25, control)
    (objective,) = trained
    assert list(objective.reference) == pq.read_table(control / METRICS)["loss"].to_pylist()
    assert len(objective.reference) == config.posttrain.steps
    assert objective.dual.target == pytest.approx(0.25, abs=1e-12)


def test_a_width_of_the_heads_replaces_the_even_share(config):
    wide = dataclasses.replace(config.dense, num_heads=3, head_dim=6)
    cfg = wide.decoder(vocab_size=300, max_length=32)
    assert (cfg.num_heads, cfg.head_dim, cfg.hidden_size) == (3, 6, 16)
    assert config.dense.decoder(300, 32).head_dim == config.dense.hidden_size // 2
    for changes, message in (
        ({"head_dim": 3}, r"config.dense.head_dim = 3 must be even"),
        ({"num_heads": 3}, r"hidden_size = 16 must be .*or give config.dense.head_dim"),
    ):
        with pytest.raises(UsageError, match=message):
            dataclasses.replace(config, dense=dataclasses.replace(config.dense, **changes))


def test_the_models_of_a_pair_are_found_by_their_roles(whole, tmp_path):
    folder, summary = whole
    folders = model_folders(folder)
    assert list(folders) == ["dense", "control", "sparse"]
    numbers = sparse_jax.load(folders["sparse"]).numbers
    assert numbers["target loss"] == summary.variants[0].runs[0].target
    weights = {
        lm_jax.load_pretrained(each, without_gates=role == "sparse").sha256
        for role, each in folders.items()
    }
    assert len(weights) == 3
    with pytest.raises(BadInputError, match="finished iaj sparse pair"):
        model_folders(tmp_path)


def test_every_task_is_scored_for_all_models_or_named_with_the_reason(whole):
    summary = whole[1]
    scored = {score.task for score in summary.scores}
    left_out = {each.task for each in summary.unscored}
    assert scored | left_out == {*TextConfig().tasks} <= {*GENERATORS} and not scored & left_out
    assert len(summary.scores) == len(scored) * (2 + len(summary.variants))


@pytest.mark.slow
def test_stopped_anywhere_it_ends_in_the_same_models(whole, config, tmp_path, monkeypatch):
    """Stopped in both phases of pretraining, in the control and in post-training."""
    reference, summary = whole
    # Counts of updates over all starts: 4 and 2 of pretraining, then 2 of each post-training.
    stops, updates = {3, 5, 7, 10}, iter(range(1, 100))

    def share_stop():
        if next(updates) in stops:
            stop.request()
        return stop.requested()

    monkeypatch.setattr(loop.processes, "share_stop", share_stop)
    for _ in stops:
        with stop.signals_as_requests(), pytest.raises(StoppedError):
            start(config, tmp_path)
    again = start(config, tmp_path)
    assert untimed(again) == untimed(summary)
    for model in ("dense/model", "sparse/seed_0/control/model"):
        name = f"{model}/model.safetensors"
        assert (tmp_path / name).read_bytes() == (reference / name).read_bytes()


def untimed(summary):
    phases = {
        name: dataclasses.replace(getattr(summary.dense, name), seconds=0.0)
        for name in ("plateau", "cooldown")
    }
    return dataclasses.replace(summary, dense=dataclasses.replace(summary.dense, **phases))


def test_wrong_settings_are_named():
    for changes, message in (
        ({"variants": ("teacher",)}, 'of which the first is "sparse"'),
        ({"text": {"tasks": ("coppy",)}}, "did you mean 'copy'"),
        ({"text": {"task_share": 1.0}}, r"config.text.task_share = 1.0 must be"),
        (
            {"posttrain": dataclasses.replace(PairConfig().posttrain, context=9)},
            "config.posttrain.context = 9 must be left out",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            from_plain(changes, PairConfig)


def test_numbers_of_two_digits_are_tokens(whole):
    """However rare they are in the text: other merges come after them."""
    tokenizer = open_prepared(whole[0] / pair_run.DATA).tokenizer
    for number in range(100):
        assert len(tokenizer.encode(f"x{number:02d}")) == len(tokenizer.encode("x")) + 1, number
