"""The second stage of a training of replaced heads: KL(model || hybrid) of the next token."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, StoppedError, UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.lora import LoraConfig
from lm_jax.run import stop
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.study import Work, frame
from lm_jax.text.examples import IGNORE_INDEX
from lm_jax.train.objective import ignore_index_batch
import polyattn_jax
from polyattn_jax.recipes.row_maps import parse_recipe, relu_power
from polyattn_jax.recipes.substitute import substitute
from polyattn_jax.recipes.trained_attention import HYBRID
from polyattn_jax.studies.distill import STUDY, report
from polyattn_jax.studies.distill import run as distill
from polyattn_jax.studies.distill.matching import HeadMatching, LogitMatching
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.settings import DistillConfig
from polyattn_jax.studies.distill.task import Onward
from tests import tiny
from tests.polyattn_jax.conftest import write_documents

# Run by `make test-all`.
pytestmark = pytest.mark.long

B, T = 2, 9
CFG = tiny.GROUPED
# Both query heads of the second key head of the second layer.
REPLACED = ((1, 2), (1, 3))
BIAS = 0.75
U = 2.0**-24


def objective(recipe="relu:p=2", replaced=REPLACED):
    adapters = LoraConfig(rank=2, alpha=4.0, targets=("q", "k", "v", "o"))
    return LogitMatching(CFG, parse_recipe(recipe).map, BIAS, replaced, adapters)


@pytest.fixture(scope="module")
def frozen():
    params = tiny.params(CFG)
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    # Logits of some units, so that distributions differ.
    final = jax.tree.map(lambda a: a * 30, params["final"])
    return params | {"blocks": blocks, "final": final}


@pytest.fixture(scope="module")
def tokens_BS():
    """Two rows, the second with padding."""
    drawn = np.random.default_rng(1).integers(0, CFG.vocab_size, (B, T + 1)).astype(np.int32)
    drawn[1, 7:] = IGNORE_INDEX
    return jnp.asarray(drawn)


def moved(one):
    """Parameters that differ from those at the start everywhere."""
    rng = np.random.default_rng(0)
    start = params_lib.init(jax.random.key(0), one.spec)
    return jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), start)


def loss_of(one, frozen, tokens_BS):
    normalizers = one.normalizers(tokens_BS)
    return lambda p: one.loss_terms(p, frozen, None, tokens_BS, normalizers, jax.random.key(0))[0]


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog"])
def test_without_a_replaced_head_the_divergence_is_zero(frozen, tokens_BS, recipe):
    """Whatever the adapters are: no layer reads them, that of the output neither."""
    one = objective(recipe, replaced=())
    params = moved(one)
    sums = one.evaluate(params, frozen, tokens_BS)
    assert float(sums["loss"]) == 0.0 and int(sums["tokens"]) == 9 + 5 + 1
    loss, gradient = jax.value_and_grad(loss_of(one, frozen, tokens_BS))(params)
    assert float(loss) == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    some = objective(recipe)
    assert one.evaluate(params, frozen, tokens_BS)["tokens"] > 0
    assert float(some.evaluate(params, frozen, tokens_BS)["loss"]) > 1e-3


def dense(one, frozen, tokens_BS):
    """The same loss of merged weights and whole logits: a function of the parameters.

    The queries, keys and values of the second key head of layer 1 are the adapted ones, and so is
    the output of that whole layer.
    """
    batch = ignore_index_batch(tokens_BS)
    read = {
        "q": np.array([False, False, True, True])[:, None],
        "k": np.array([False, True])[:, None],
        "v": np.array([False, True])[:, None],
        "o": np.True_,
    }
    attend = substitute([relu_power(2)], 0, BIAS, jnp.asarray(one.heads_LN))
    log_p = jax.nn.log_softmax(lm_jax.forward(frozen, batch.input_BT, CFG).logits)

    def loss(params):
        merged = lora.merge(frozen, params["adapters"], one.adapters)
        own, given = frozen["blocks"]["mixer"], merged["blocks"]["mixer"]
        mixer = {
            name: own[name].at[1].set(jnp.where(own_heads, given[name][1], own[name][1]))
            for name, own_heads in read.items()
        }
        weights = frozen | {"blocks": frozen["blocks"] | {"mixer": own | mixer}}
        log_q = jax.nn.log_softmax(
            lm_jax.forward(weights, batch.input_BT, CFG, attend=attend).logits
        )
        kl_BT = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        return jnp.where(batch.loss_mask_BT, kl_BT, 0).sum() / batch.loss_mask_BT.sum()

    return loss


def test_value_and_gradient_are_those_of_merged_weights_and_whole_logits(frozen, tokens_BS):
    one = objective()
    params = moved(one)
    loss, gradient = jax.jit(jax.value_and_grad(loss_of(one, frozen, tokens_BS)))(params)
    want, wanted = jax.jit(jax.value_and_grad(dense(one, frozen, tokens_BS)))(params)
    # Some 40 operations follow each other, forward and backward, of sums of at most 60 products.
    rounding = 40 * 60 * U
    assert float(want) > 1e-3
    np.testing.assert_allclose(loss, want, rtol=rounding)
    for path, leaf in params_lib.by_path(wanted).items():
        got = params_lib.by_path(gradient)[path]
        assert np.any(leaf[1]) and not np.any(got[0]), path
        np.testing.assert_allclose(got, leaf, rtol=0, atol=rounding * np.abs(leaf).max())


def test_the_loss_of_an_evaluation_is_that_of_training(frozen, tokens_BS):
    one = objective("hedgehog")
    params = moved(one)
    sums = one.evaluate(params, frozen, tokens_BS)
    loss = loss_of(one, frozen, tokens_BS)(params)
    np.testing.assert_allclose(sums["loss"] / sums["tokens"], loss, rtol=60 * U)


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog"])
def test_the_second_stage_begins_where_the_first_ended(frozen, tokens_BS, recipe):
    second = objective(recipe)
    first = HeadMatching(
        CFG, second.row_map, BIAS, REPLACED, LoraConfig(rank=2, alpha=4.0, targets=("q", "k"))
    )
    trained = moved(first)
    batch = ignore_index_batch(tokens_BS)
    begun = second.begun(trained, 3)
    assert jax.tree.map(np.shape, begun) == jax.tree.map(
        lambda leaf: leaf.shape, params_lib.abstract(second.spec)
    )
    before = first.run(trained, frozen, batch, mixer=HYBRID).hidden
    np.testing.assert_array_equal(second.run(begun, frozen, batch, mixer=HYBRID).hidden, before)
    jax.tree.map(lambda leaf: leaf.delete(), begun)
    assert np.isfinite(jax.tree.leaves(trained)[0]).all()


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog"])
def test_kept_heads_have_the_queries_keys_and_values_of_the_model(frozen, tokens_BS, recipe):
    """Replaced heads write nothing here, so that heads 0 and 1 would show a change."""
    one = objective(recipe)
    mixer = frozen["blocks"]["mixer"]
    silent = frozen | {
        "blocks": frozen["blocks"] | {"mixer": mixer | {"o": mixer["o"].at[1, 2:].set(0)}}
    }
    params, batch = moved(one), ignore_index_batch(tokens_BS)
    without = dataclasses.replace(
        one, adapters=dataclasses.replace(one.adapters, targets=("q", "k", "v"))
    )
    of_output = params["adapters"]["blocks"]["mixer"].pop("o")
    plain = lm_jax.forward(silent, batch.input_BT, CFG).hidden
    hybrid = without.run(params, silent, batch, mixer=HYBRID).hidden
    np.testing.assert_array_equal(hybrid, plain)
    params["adapters"]["blocks"]["mixer"]["o"] = of_output
    assert np.abs(one.run(params, silent, batch, mixer=HYBRID).hidden - plain).max() > 1e-3


def test_settings_of_a_second_stage():
    config = DistillConfig(logit_steps=5, logit_learning_rate=0.5, logit_targets=("v",))
    assert (config.train_logits.steps, config.train_logits.learning_rate) == (5, 0.5)
    assert config.adapters_of_logits(maps=False).targets == ("q", "k", "v")
    assert config.adapters_of_logits(maps=True).targets == ("v",)
    for wrong in ((), ("q", "up")):
        with pytest.raises(UsageError, match=r"config\.logit_targets = .* q, k, v and o"):
            DistillConfig(logit_targets=wrong)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text") / "documents")


def settings(model, text):
    config = ConfigDict(dataclasses.asdict(DistillConfig()))
    config.corpus.update({"source": str(text), "splits": (0.7, 0.3, 0.0), "max_tokens": 0})
    config.update(
        {
            "model": str(model),
            "recipe": "hedgehog",
            "context": 32,
            "batch_size": 8,
            "steps": 6,
            "eval_every": 6,
            "save_every": 5,
            "resamples": 200,
            "logit_steps": 20,
            "logit_learning_rate": 3e-3,
        }
    )
    return config


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    """A random model whose heads concentrate and whose logits vary, so that a recipe matters."""
    given = lm_jax.load_pretrained(toy("llama32_1b.py"))
    blocks, mixer = given.params["blocks"], given.params["blocks"]["mixer"]
    params = given.params | {
        "blocks": blocks | {"mixer": mixer | {"q": 16 * mixer["q"], "o": 4 * mixer["o"]}},
        "final": jax.tree.map(lambda a: 8 * a, given.params["final"]),
    }
    folder = tmp_path_factory.mktemp("models") / "sharp"
    lm_jax.save_pretrained(folder, given.cfg, params, given.tokenizer)
    return folder


@pytest.fixture(scope="module")
def trained(model, text, tmp_path_factory):
    """The folder of a run in two stages."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    frame.execute(STUDY, settings(model, text), folder)
    return folder


def test_the_second_stage_lowers_the_divergence_on_text_that_it_did_not_see(trained, model):
    summary = load_result(trained / "summary.json", DistillSummary)
    stage = summary.logits
    assert stage.divergence_change.high < 0
    assert (stage.steps, stage.targets) == (20, ("q", "k", "v", "o"))
    cfg = lm_jax.load_pretrained(model).cfg
    both, H = cfg.num_heads + cfg.num_kv_heads, cfg.head_dim
    maps = cfg.num_layers * both * H**2
    # Rank 8; q and o have the heads of queries on one side, k and v those of keys.
    adapters = cfg.num_layers * 8 * (4 * cfg.hidden_size + 2 * both * H)
    assert (summary.parameters, stage.parameters) == (maps, maps + adapters)
    evaluations = pq.read_table(trained / "train_logits" / "evaluations.parquet").to_pylist()
    last = [row["value"] for row in evaluations if row["name"] == "validation/loss"][-1]
    assert stage.divergence_after.estimate == pytest.approx(last, rel=1e-5)


def test_the_summary_is_that_of_the_table(trained):
    summary = load_result(trained / "summary.json", DistillSummary)
    stage = summary.logits
    rows = pq.read_table(trained / "logits.parquet").to_pydict()
    first = pq.read_table(trained / "losses.parquet").to_pydict()
    assert (rows["first"], rows["softmax"]) == (first["after"], first["softmax"])
    mean = lambda name: np.sum(rows[name]) / np.sum(rows["tokens"])  # noqa: E731
    assert stage.after.estimate == pytest.approx(mean("second") - mean("softmax"))
    assert stage.change.estimate == pytest.approx(mean("second") - mean("first"))
    assert stage.divergence_before.estimate == pytest.approx(mean("divergence_first"))
    assert stage.divergence_after.estimate == pytest.approx(mean("divergence_second"))
    text = report.format_summary(summary)
    assert max(map(len, text.splitlines())) <= 80
    shown = f"{stage.divergence_after.estimate:.3g}"
    assert shown in text and shown in (trained / "report.html").read_text("utf-8")
    without = dataclasses.replace(summary, logits=None)
    assert "divergence" not in report.format_summary(without)


def test_what_the_last_stage_left_is_what_other_programs_load(trained, model, text):
    heads = polyattn_jax.load_trained(trained / "trained")
    assert sorted(heads.params) == ["adapters", "maps"]
    assert heads.adapters.targets == ("q", "k", "v", "o")
    config = from_plain(settings(model, text), DistillConfig)
    model = lm_jax.load_pretrained(model)
    task = distill.open_task(config, trained)
    measured = distill.measure(task, heads.objective(model), heads.params)
    rows = pq.read_table(trained / "logits.parquet")
    np.testing.assert_array_equal(measured["hybrid"], rows["second"].to_numpy())
    tokens_BT = jnp.asarray(task.validation.at(0)["tokens"][:2, :-1])
    prompts = [tokens_BT[0, :6].tolist(), tokens_BT[1, :4].tolist()]
    for prompt, new in zip(prompts, heads.generate(model, prompts, max_new_tokens=3), strict=True):
        logits = heads.forward(model, jnp.asarray([prompt + new])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new


def test_the_second_stage_reads_on_where_the_first_ended(trained, model, text):
    task = distill.open_task(from_plain(settings(model, text), DistillConfig), trained)
    onward = Onward(task.batches, 6)
    np.testing.assert_array_equal(onward.at(2)["tokens"], task.batches.at(8)["tokens"])
    assert onward.fingerprint != task.batches.fingerprint


def test_a_second_stage_that_was_stopped_ends_with_the_same_parameters(
    trained, model, text, tmp_path, monkeypatch
):
    folder = shutil.copytree(trained, tmp_path / "run")
    for name in ("train_logits", "trained"):
        shutil.rmtree(folder / name)
    config, read = from_plain(settings(model, text), DistillConfig), Onward.at

    def stopping(self, k):
        if k == 7:
            stop.request()
        return read(self, k)

    def fail(*args):
        raise BadInputError("not measured again")

    monkeypatch.setattr(distill, "measure", fail)
    monkeypatch.setattr(Onward, "at", stopping)
    try:
        with pytest.raises(StoppedError, match="after step 8"):
            distill.train_and_measure(config, Work(folder, ""))
    finally:
        stop._stop.clear()
    monkeypatch.setattr(Onward, "at", read)
    with pytest.raises(BadInputError, match="not measured again"):
        distill.train_and_measure(config, Work(folder, ""))
    first, second = (polyattn_jax.load_trained(each / "trained") for each in (trained, folder))
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_a_summary_of_one_stage_is_still_read(trained, tmp_path):
    stored = json.loads((trained / "summary.json").read_text("utf-8"))
    del stored["logits"]
    (tmp_path / "summary.json").write_text(json.dumps(stored))
    assert load_result(tmp_path / "summary.json", DistillSummary).logits is None
