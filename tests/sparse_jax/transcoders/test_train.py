"""A transcoder from a command: what it learns, its controls, what its folder holds."""

import dataclasses
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run import results
from lm_jax.run.files import read_json, write_json
from lm_jax.study import frame
from lm_jax.text.examples import Examples, OnePass
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.prepared import open_prepared
from lm_jax.train import loop
from lm_jax.train.metrics import EVALUATIONS
from lm_jax.train.objective import ignore_index_batch
from sparse_jax import transcoders
from sparse_jax.graphs import attribute
from sparse_jax.studies.transcoders import STUDY, report, run
from sparse_jax.studies.transcoders.report_text import format_summary
from sparse_jax.studies.transcoders.results import StoredScales
from sparse_jax.studies.transcoders.scores import PromptSet
from sparse_jax.studies.transcoders.settings import TranscoderTraining
from sparse_jax.transcoders import thresholds
from sparse_jax.transcoders.inputs import read_activations
from sparse_jax.transcoders.objective import Penalties
from tests.lm_jax.train.tiny_run import stepwise
from tests.sparse_jax.small_runs import save_base, write_text

# Run by `make test-all`.
pytestmark = pytest.mark.long

SCORE = "validation/graph/replacement"


def start(config, folder):
    """Runs or resumes the training of a config."""
    return frame.execute(STUDY, config, folder)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return TranscoderTraining(
        model=str(save_base(folder / "model")),
        corpus=CorpusConfig(str(write_text(folder / "text")), "document", splits=(0.7, 0.3, 0.0)),
        context=16,
        features=48,
        penalties=Penalties(sparsity=0.02, active=4, active_start=12),
        batch_size=8,
        steps=40,
        learning_rate=1e-2,
        eval_every=20,
        scale_batches=2,
        score_prompts=2,
        score_tokens=8,
        score_features=64,
        scores_every=30,
        control=True,
        mesh=(2, 1, 2),
    )


@pytest.fixture(scope="module")
def looked():
    """Shapes of the parts of every array of the size of the first layer's decoder.

    Before the training of the transcoder, where its biases are initialised, and after an update.
    """
    return []


@pytest.fixture(scope="module")
def whole(config, looked, tmp_path_factory):
    folder, decoder = tmp_path_factory.mktemp("clt"), (1, config.features, 16)
    before = {id(array): array for array in jax.live_arrays()}

    def look():
        arrays = [a for a in jax.live_arrays() if a.shape == decoder and id(a) not in before]
        looked.append([{each.data.shape for each in a.addressable_shards} for a in arrays])

    def initial_biases(*args):
        look()
        return thresholds.initial_biases(*args)

    def on_step(step):
        if step == 1:
            look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "thresholds", types.SimpleNamespace(initial_biases=initial_biases))
        patch.setattr(run, "train", stepwise(loop.train, on_step))
        return folder, start(config, folder)


def test_features_are_split_over_devices_from_the_draw_on(whole, config, looked):
    """No device has a whole decoder, and after an update nothing keeps the initial one."""
    del whole
    part = {(1, config.features // 2, 16)}
    # The weights and two moments; then those of the control, which has more features.
    assert looked[:2] == [[part], [part] * 3]


def test_it_learns_and_exports_what_it_was_evaluated_as(whole, config):
    folder, summary = whole
    evaluations = pq.read_table(folder / EVALUATIONS).to_pylist()
    left = [row["value"] for row in evaluations if row["name"] == "validation/unexplained"]
    assert left[-1] == summary.reconstruction.unexplained
    assert left[-1] < left[0] < 1.0
    assert (summary.ended, summary.steps) == ("steps", 40)
    exported, origin = transcoders.load(folder / run.TRANSCODER)
    source = run.SourceModel.load(config.model)
    assert origin.model_sha256 == source.identity.text
    assert source.identity.weights == source.sha256 == summary.model_sha256
    # The folder holds a function of raw activations: the same errors, without any scale in it.
    scales = results.load_result(folder / run.SCALES, StoredScales)
    squares, outputs, tokens = [], [], 0
    held_out = Examples(
        open_prepared(folder / run.DATA), "validation", context=16, mode="window", limit=200
    )
    batches = OnePass(held_out, batch_size=8)
    for k in range(batches.per_epoch):
        batch = ignore_index_batch(jnp.asarray(batches.at(k)["tokens"]))
        ones = dataclasses.replace(scales, input_scale=(1.0, 1.0), output_scale=(1.0, 1.0)).scales
        acts = read_activations(source.model, ones, batch, skip_start=1, outlier=20.0)
        kept = np.asarray(acts.mask_X)
        y_LXD = np.asarray(exported.decode(exported.encode(acts.input_LXD)), np.float64)[:, kept]
        outputs.append(np.asarray(acts.output_LXD, np.float64)[:, kept])
        squares.append(((y_LXD - outputs[-1]) ** 2).sum((1, 2)))
        tokens += kept.sum()
    assert tokens == summary.validation_tokens
    outputs_LXD = np.concatenate(outputs, 1)
    centred_L = ((outputs_LXD - outputs_LXD.mean(1, keepdims=True)) ** 2).sum((1, 2))
    left_L = np.sum(squares, 0) / centred_L
    # Sums of positive numbers in float32, over 16 tokens of a batch at a time and 16 of the size.
    np.testing.assert_allclose(summary.reconstruction.unexplained_by_layer, left_L, rtol=1e-3)
    assert "features active per token" in format_summary(summary)


@pytest.fixture(scope="module")
def untrained(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    # Dimensions of MLP inputs have other scales, so that the norms of tokens differ.
    base = lm_jax.load_pretrained(config.model)
    scale = base.params["blocks"]["ln2"]["scale"]
    scaled = scale * jnp.geomspace(0.1, 3.0, scale.shape[-1])[None]
    blocks = base.params["blocks"] | {"ln2": {"scale": scaled}}
    params = base.params | {"blocks": blocks}
    lm_jax.save_pretrained(folder / "model", base.cfg, params, base.tokenizer)
    short = dataclasses.replace(
        config,
        model=str(folder / "model"),
        steps=1,
        learning_rate=1e-9,
        eval_every=1,
        firing_rate=0.25,
        control=False,
        mesh=(-1, 1, 1),
        outlier=1.2,
        # More features than this are active.
        stop_l0=2.0,
    )
    return folder / "run", start(short, folder / "run")


def test_a_finished_run_is_shown_where_its_mesh_cannot_be(whole, config, monkeypatch):
    monkeypatch.setattr(sharding, "make_mesh", None)
    assert start(config, whole[0]) == whole[1]


def test_features_fire_at_the_wanted_rate_before_training(untrained):
    _, summary = untrained
    assert summary.ended == "steps"
    # Of 48 features and 2 layers; the quantiles are those of two batches of other text.
    assert summary.reconstruction.l0 == pytest.approx(0.25 * 48 * 2, rel=0.15)


def test_outliers_keep_their_mlps(untrained):
    folder, summary = untrained
    scales = results.load_result(folder / run.SCALES, StoredScales).scales
    model = run.SourceModel.load(summary.model).model
    held_out = Examples(
        open_prepared(folder / run.DATA), "validation", context=16, mode="window", limit=200
    )
    replaced = after_start = 0
    for k in range(4):
        batch = ignore_index_batch(jnp.asarray(OnePass(held_out, batch_size=8).at(k)["tokens"]))
        acts = read_activations(model, scales, batch, skip_start=1, outlier=1.2)
        replaced += int(acts.mask_X.sum())
        after_start += int(batch.input_mask_BT[:, 1:].sum())
    assert summary.substitution.tokens == replaced < after_start


def test_scores_of_graphs_are_in_the_log_and_in_the_summary(whole, config):
    folder, summary = whole
    rows = pq.read_table(folder / EVALUATIONS).to_pylist()
    logged = {row["step"]: row["value"] for row in rows if row["name"] == SCORE}
    # Evaluations are after 20 and 40 steps, and the first at or after 30 is the last.
    assert list(logged) == [40]
    assert logged[40] == summary.graphs.mean.unpruned.replacement
    # The graphs are those of the exported folder, on the first held-out windows.
    held_out = Examples(
        open_prepared(folder / run.DATA), "validation", context=16, mode="window", limit=200
    )
    batches = OnePass(held_out, batch_size=8)
    tokens = (batches.at(k)["tokens"] for k in range(batches.per_epoch))
    prompts = PromptSet.of_windows(tokens, count=2, length=8)
    assert summary.graphs.sha256 == prompts.sha256
    exported, _ = transcoders.load(folder / run.TRANSCODER)
    model = run.SourceModel.load(config.model).model
    graphs = [attribute(model, exported, each, max_features=64) for each in prompts.tokens_BT]
    wanted = [graph.scores().unpruned.replacement for graph in graphs]
    # Features next to their threshold apart, only the order of sums differs.
    np.testing.assert_allclose(summary.graphs.replacement_by_prompt, wanted, rtol=1e-3)


def test_the_controls_stand_beside_the_transcoder(whole, config):
    folder, summary = whole
    by_name = {each.name: each for each in summary.controls}
    assert list(by_name) == ["per_layer", "shuffled", "neurons", "largest_neurons"]
    per_layer, shuffled, neurons, largest = by_name.values()
    # As many parameters as one feature a layer in each of two layers allows.
    assert abs(per_layer.parameters - summary.parameters) <= (2 * 16 + 2) * 2 / 2
    loaded, _ = transcoders.load(folder / run.PER_LAYER / run.TRANSCODER)
    assert loaded.cfg.window == 1 and loaded.cfg.features == per_layer.features > 48
    own = frame.load_summary(STUDY, folder / run.PER_LAYER)
    assert own.substitution == per_layer.substitution and own.window == 1
    assert shuffled.l0 == summary.reconstruction.l0
    assert shuffled.unexplained > summary.reconstruction.unexplained
    # Every unit of a gated MLP is other than zero.
    mlp_size = run.SourceModel.load(config.model).model.cfg.mlp_size
    assert neurons.l0 == 2 * mlp_size and neurons.graphs is None
    assert [each.steps for each in summary.controls] == [summary.steps, None, None, None]
    # On the same text, and no neuron is zero; rounding may move features at their thresholds.
    assert largest.l0 == pytest.approx(summary.reconstruction.l0, rel=1e-3)
    assert 0 < largest.unexplained < 1 and 0 < largest.graphs.mean.unpruned.replacement < 1
    assert largest.graphs.sha256 == summary.graphs.sha256
    # Nothing is left out of the whole graph of all neurons; its pruned one was not measured.
    own = str(report.controls(summary).body)
    row = own[own.index(">neurons<") :].split("</tr>")[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", row)[-4:] == ["1.000", "–", "1.000", "–"]
    assert "saw the same batches" in own and "parameters, 40 updates: " in format_summary(summary)
    fewer = dataclasses.replace(
        summary, controls=(dataclasses.replace(per_layer, steps=30), *summary.controls[1:])
    )
    own = " ".join(str(report.controls(fewer).body).split())
    assert "in the same order, for 30 updates in place of 40." in own and "saw the" not in own


def test_training_ends_when_few_features_are_active(config, tmp_path):
    # At a share of .9 of the tokens, 43 of the 48 features of each of the two layers are active.
    short = dataclasses.replace(
        config, stop_l0=46.0, control=False, eval_every=10, firing_rate=0.9, learning_rate=1e-9
    )
    summary = start(short, tmp_path)
    assert summary.ended == "l0" and summary.steps == 10
    assert summary.reconstruction.l0 / 2 <= 46 < summary.reconstruction.l0
    rows = pq.read_table(tmp_path / EVALUATIONS).to_pylist()
    assert {row["step"] for row in rows if row["name"] == SCORE} == {10}
    # Run again, it has ended already.
    (tmp_path / "finished.json").unlink()
    assert start(short, tmp_path) == summary
    assert "training ended by stop_l0 after 10 updates" in format_summary(summary)
    with pytest.raises(UsageError, match=r"config\.stop_l0 = 1\.0 must be 0 for batchtopk"):
        dataclasses.replace(config, stop_l0=1.0, kind="batchtopk")


def test_thresholds_keep_the_activity_of_batchtopk(config, tmp_path):
    summary = start(dataclasses.replace(config, kind="batchtopk", control=False), tmp_path)
    before, after = summary.batch_topk, summary.reconstruction
    assert before is not None
    # Four features a layer, up to the masked tokens of a batch.
    assert before.l0 == pytest.approx(8.0, rel=0.02)
    np.testing.assert_allclose(after.l0_by_layer, before.l0_by_layer, rtol=0.2)
    assert abs(after.unexplained - before.unexplained) < 0.05
    exported, _ = transcoders.load(tmp_path / run.TRANSCODER)
    assert exported.cfg.kind == "jumprelu"
    # One threshold a layer.
    assert np.ptp(np.asarray(exported.theta_LF), axis=1).max() == 0
    assert "before thresholds replaced BatchTopK" in format_summary(summary)
    # The scores of both are of the same prompts, and as near to each other as their activity is.
    scores = [each.mean.unpruned for each in (summary.batch_topk_graphs, summary.graphs)]
    assert summary.batch_topk_graphs.sha256 == summary.graphs.sha256
    assert scores[0] != scores[1] and abs(scores[0].replacement - scores[1].replacement) < 0.1


def test_scales_of_another_model_are_refused(whole, config, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    (folder / "finished.json").unlink()
    stored = read_json(folder / run.SCALES)
    write_json(folder / run.SCALES, stored | {"model_sha256": "0" * 64})
    with pytest.raises(BadInputError, match=r"weights 000000000000, not \w+; put that back"):
        start(config, folder)


def test_what_does_not_fit_is_refused_before_there_is_a_folder(config, tmp_path):
    for changes, message in (
        ({"model": ""}, r"config\.model is empty"),
        ({"context": 64}, "context = 64 is beyond the 32 positions"),
    ):
        with pytest.raises(UsageError, match=message):
            start(dataclasses.replace(config, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="batch of 3 does not divide"):
        start(dataclasses.replace(config, batch_size=3), tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").glob("[!.]*")] == ["log.txt"]
    with pytest.raises(UsageError, match=r"config\.firing_rate = 1\.5 must be between 0 and 1"):
        dataclasses.replace(config, firing_rate=1.5)
