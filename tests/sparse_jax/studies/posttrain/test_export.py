"""Export over bfloat16 weights, and of the ablation of Eq. 2, against the trained parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.checkpoint.adapters import ADAPTER_FILE, load_adapters
from lm_jax.checkpoint.manager import FOLDER
from lm_jax.model.params import by_path
from lm_jax.run.files import read_json
from lm_jax.run.results import load_result
from lm_jax.train.metrics import EVALUATIONS
import sparse_jax
from sparse_jax.studies.posttrain import export
from sparse_jax.studies.posttrain.report_text import format_rounding
from sparse_jax.studies.posttrain.results import RunResult
from tests.sparse_jax.small_runs import command, run_folder, settings

# Run by `make test-all`.
pytestmark = pytest.mark.long

U = 2.0**-24


@pytest.fixture(scope="module")
def rounded(base, text, tmp_path_factory):
    """Adapters over bfloat16 weights whose updates are near half a step of them."""
    folder = tmp_path_factory.mktemp("rounded") / "run"
    changes = {"dtype": "bfloat16", "steps": 4, "eval_every": 4, "learning_rate": 2e-3}
    command(settings(base, text, **changes), folder)
    return folder


def last_validation_loss(folder):
    rows = pq.read_table(folder / EVALUATIONS).to_pylist()
    return [row["value"] for row in rows if row["name"] == "validation/loss"][-1]


def updates_of(folder, base):
    """The adapted weights in bfloat16, and their updates in float64, by path."""
    dense = lm_jax.load_pretrained(base, dtype=jnp.bfloat16)
    adapters, how = load_adapters(folder / ADAPTER_FILE, base_sha256=dense.sha256)
    leaves, weights = by_path(adapters), by_path(dense.params)
    for path in {name.rpartition("/")[0] for name in leaves}:
        down, up = (np.asarray(leaves[f"{path}/{name}"], np.float64) for name in ("down", "up"))
        product = np.stack([np.tensordot(d, u, axes=1) for d, u in zip(down, up, strict=True)])
        yield path, np.asarray(weights[path]), how.strength * product


def test_over_bfloat16_the_export_is_rounded_once_and_reports_the_cost(rounded, base):
    folder = run_folder(rounded)
    stored = by_path(sparse_jax.load(folder / export.EXPORTED, dtype=jnp.bfloat16).params)
    lost = whole = sizes = 0.0
    count = 0
    for path, weight, update in updates_of(folder, base):
        exact = weight.astype(np.float64) + update
        # Half a unit in the last of eight binary digits, and the float32 sum before it.
        bound = (2.0**-9 + 2.0**-22) * np.maximum(np.abs(exact), np.abs(weight.astype(np.float64)))
        assert np.all(np.abs(np.asarray(stored[path]).astype(np.float64) - exact) <= 2 * bound)
        lost += np.sum((np.asarray(stored[path]).astype(np.float64) - exact) ** 2)
        whole += np.sum(update**2)
        sizes += np.sum((np.abs(weight.astype(np.float64)) + np.abs(update)) ** 2)
        count += weight.size
    result = read_json(folder / export.RESULT)
    rounding = result["rounding"]
    assert rounding["dtype"] == "bfloat16"
    want = np.sqrt(lost / whole)
    # The loss is computed from a float32 sum of weight and update, off by 4 units of both; then two
    # sums of squares, half of whose errors a root leaves, and a quotient.
    off = 4 * U * np.sqrt(sizes / whole) + (count + 10) * U * want
    assert rounding["update_lost"] == pytest.approx(want, abs=off)
    assert rounding["update_lost"] > 0.02
    # Before: with separate adapters, as in training. After: the exported model.
    assert rounding["loss_before"] == last_validation_loss(folder)
    assert rounding["loss_after"] == result["loss"]["estimate"]
    assert rounding["loss_before"] != rounding["loss_after"]


def test_the_cost_is_printed_and_a_float32_export_has_none_without_training_again(
    rounded, base, text
):
    folder = run_folder(rounded)
    before = read_json(folder / export.RESULT)
    config = settings(base, text, dtype="bfloat16", steps=4, eval_every=4, learning_rate=2e-3)
    share = f"rounding loses {before['rounding']['update_lost']:.1%} of the update"
    assert share in format_rounding(load_result(folder / export.RESULT, RunResult).rounding)
    saved = {file: file.stat().st_mtime_ns for file in (folder / FOLDER).rglob("*")}

    config.export_dtype = "float32"
    command(config, rounded, resume="force")
    assert not format_rounding(load_result(folder / export.RESULT, RunResult).rounding)
    assert {file: file.stat().st_mtime_ns for file in (folder / FOLDER).rglob("*")} == saved
    after = read_json(folder / export.RESULT)
    assert after["rounding"]["dtype"] == "float32"
    assert after["rounding"]["update_lost"] == 0.0
    assert after["rounding"]["loss_before"] == before["rounding"]["loss_before"]
    exported = sparse_jax.load(folder / export.EXPORTED)
    stored = by_path(exported.params)
    for path, weight, update in updates_of(folder, base):
        exact = weight.astype(np.float64) + update
        terms = np.abs(weight.astype(np.float64)) + np.abs(update)
        assert np.all(np.abs(np.asarray(stored[path], np.float64) - exact) <= 2.0**-22 * terms)


def test_renormalised_weights_are_trained_evaluated_and_exported(base, text, tmp_path):
    """The ablation of Eq. 2: in every layer the weights of a row with an open edge sum to one."""
    changes = {"steps": 4, "eval_every": 4, "renormalise": True}
    command(settings(base, text, **changes), tmp_path / "run")
    folder = run_folder(tmp_path / "run")
    result = read_json(folder / export.RESULT)
    # Training evaluates the objective, the last comparison the exported model.
    assert result["loss"]["estimate"] == pytest.approx(last_validation_loss(folder), rel=1e-5)
    model = sparse_jax.load(folder / export.EXPORTED)
    assert model.gates.renormalise
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 16), 5, 60)
    output = model.forward(tokens_BT, record={"attn.pattern": lm_jax.keep})
    sum_LBNT = np.asarray(output.records["attn.pattern"]).sum(-1)
    is_open = sum_LBNT > 0
    assert 0.1 < is_open.mean() < 1.0
    np.testing.assert_allclose(sum_LBNT[is_open], 1.0, rtol=16 * 2.0**-23)
    card = (folder / export.EXPORTED / "README.md").read_text("utf-8")
    assert "the weights of the open ones are divided by their sum" in card


def test_all_weights_can_be_trained_and_biases_with_them(base, text, tmp_path):
    changes = {"full": True, "learn_bias": True, "bias": 0.25, "distill": 0.0}
    config = settings(base, text, **changes, steps=4, eval_every=4, learning_rate=1e-3)
    command(config, tmp_path / "run")
    folder = run_folder(tmp_path / "run")
    assert not (folder / ADAPTER_FILE).exists()
    model = sparse_jax.load(folder / export.EXPORTED)
    assert model.gates.bias_LN.shape == (2, 2)
    moved_LN = np.abs(model.gates.bias_LN - 0.25)
    assert moved_LN.min() > 0 and moved_LN.max() < 4e-3
    before = by_path(lm_jax.load_pretrained(base).params)
    for path, leaf in by_path(model.params).items():
        assert not np.array_equal(leaf, before[path]), path
