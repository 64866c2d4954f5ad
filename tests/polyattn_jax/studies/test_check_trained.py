"""A check of a folder of trained heads: its answers are those of the trained model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import param_spec
from lm_jax.model.lora import LoraConfig
from lm_jax.run.results import load_result
from polyattn_jax.audit.results import CheckResult, RowShares
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, replaced_heads
from polyattn_jax.recipes.row_maps import relu_power
from polyattn_jax.recipes.substitute import substitute
from polyattn_jax.recipes.trained_heads import TrainedHeads, save_trained
from polyattn_jax.recipes.trained_model import forward, with_trained
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import load_jsonl

# Run by `make test-all`.
pytestmark = pytest.mark.long

L, N = 3, 4
KEPT = ((0, 2), (1, 1), (1, 3), (2, 0))
ADAPTERS = LoraConfig(rank=2, alpha=4.0, targets=("q", "k", "v", "o"))
U = 2.0**-24


def heads_of(model, recipe, bias, size):
    """Heads of all but `KEPT`; adapters, and matrices of Hedgehog, moved by this much."""
    mask = np.ones((L, N), bool)
    mask[tuple(np.transpose(KEPT))] = False
    hybrid = HybridRecipe(1, "tiny", model.identity.text, recipe, bias, L, N, replaced_heads(mask))
    rng = np.random.default_rng(0)
    spec = lora.adapter_spec(param_spec(model.cfg), ADAPTERS)
    params = {"adapters": params_lib.init(jax.random.key(0), spec)}
    if recipe == "hedgehog":
        eye = np.eye(model.cfg.head_dim, dtype=np.float32)
        sizes = {"q": N, "k": model.cfg.num_kv_heads}
        params["maps"] = {n: np.broadcast_to(eye, (L, c, *eye.shape)) for n, c in sizes.items()}
    move = lambda x: np.asarray(x + size * rng.normal(size=x.shape), np.float32)  # noqa: E731
    return TrainedHeads(hybrid, ADAPTERS, jax.tree.map(move, params))


@pytest.fixture(scope="module")
def model(tiny):
    return lm_jax.load_pretrained(tiny)


def rows_of(folder, *, softmax):
    """The answers under softmax or under the recipe, by prompt, without those of controls."""
    rows = pq.read_table(folder / "answers").to_pylist()
    asked = [row for row in rows if not row["suite"].endswith("_control")]
    own = [row for row in asked if (row["cell"] == "softmax") == softmax]
    return sorted(own, key=lambda row: row["prompt"])


@pytest.mark.parametrize("recipe", ["hedgehog", "relu:p=2"])
def test_the_answers_are_those_of_the_trained_heads(
    run_check, model, prompts_file, texts_file, tmp_path, recipe
):
    heads = heads_of(model, recipe, 0.0, 0.2)
    save_trained(tmp_path / "trained", heads)
    outcome = run_check(
        f"--recipe={tmp_path / 'trained'}",
        *(f"--task=prompts:{prompts_file}", f"--text={texts_file}"),
        f"--workdir={tmp_path / 'run'}",
    )
    assert outcome.code in (10, 11), outcome.err
    assert f"in {L * N - len(KEPT)} of {L * N} heads (trained) of" in outcome.out
    assert "of rows is of the recipe without it" in " ".join(outcome.out.split())
    result = load_result(tmp_path / "run" / "summary.json", CheckResult)
    assert (result.trained, result.bias, result.replaced) == (True, 0.0, L * N - len(KEPT))
    suite = load_jsonl(prompts_file, model.tokenizer, max_length=model.cfg.max_length)
    prompts = {prompt.id: prompt for prompt in suite.prompts}
    rows = rows_of(tmp_path / "run", softmax=False)
    assert len(rows) == len(prompts) == 9
    changed = 0
    for row in rows:
        prompt = prompts[row["prompt"]]
        tokens_1T = jnp.asarray(prompt.tokens)[None]
        logits_V = np.asarray(heads.forward(model, tokens_1T).logits[0, -1], np.float64)
        assert row["predicted"] == logits_V.argmax()
        loss = np.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max()
        want = loss - logits_V[prompt.target]
        # The rows of a batch are padded: sums of some hundred products in another order.
        np.testing.assert_allclose(row["loss"], want, atol=4000 * U * np.abs(logits_V).max())
        plain_V = lm_jax.forward(model.params, tokens_1T, model.cfg).logits[0, -1]
        changed += np.abs(plain_V - logits_V).max() > 1e-2
    assert changed == len(rows)


def test_softmax_is_softmax_and_what_is_not_trained_yet_is_the_file_of_heads(
    run_check, model, texts_file, tmp_path
):
    """Answers, ranks, losses and dead rows, entry by entry."""
    heads = heads_of(model, "relu:p=2", -0.5, 0.0)
    save_trained(tmp_path / "trained", heads)
    held = dataclasses.asdict(heads.hybrid)
    (tmp_path / "heads.json").write_text(json.dumps(held))
    runs = []
    for recipe in ("trained", "heads.json"):
        folder = tmp_path / f"run of {recipe}"
        flags = [f"--recipe={tmp_path / recipe}", f"--text={texts_file}", f"--workdir={folder}"]
        assert run_check(*flags).code in (0, 10, 11)
        result = load_result(folder / "summary.json", CheckResult)
        answers = [rows_of(folder, softmax=each) for each in (True, False)]
        assert result.texts is not None
        losses = (result.texts.softmax, result.texts.recipe)
        runs.append((*answers, losses, result.unsafe))
        # Rows without the training are no reason for or against what was trained.
        assert (result.texts.unsafe == RowShares()) == (recipe == "trained")
        (task,) = result.tasks
        assert ("safe" in task.reason or "safe" in task.next) <= (recipe != "trained")
    assert runs[0] == runs[1]
    assert sum(row["dead_rows"] for row in runs[0][1]) > 0


def test_a_substitution_in_no_head_is_the_model_bit_for_bit(model):
    heads = heads_of(model, "hedgehog", 0.0, 0.3)
    whole = with_trained(model, heads, "trained")
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 20)))
    maps = [relu_power(4), whole.params["trained"].map]
    plain = lm_jax.forward(model.params, tokens_BT, model.cfg)
    for index, mask in ((1, np.zeros((L, N), bool)), (0, np.ones((L, N), bool))):
        attend = substitute(maps, index, 0.0, jnp.asarray(mask))
        out = forward(whole.params, tokens_BT, model.cfg, attend=attend)
        np.testing.assert_array_equal(out.logits, plain.logits)
    np.testing.assert_array_equal(forward(whole.params, tokens_BT, model.cfg).logits, plain.logits)
    attend = substitute(maps, 1, 0.0, jnp.asarray(heads.hybrid.heads_LN))
    out = forward(whole.params, tokens_BT, model.cfg, attend=attend)
    np.testing.assert_array_equal(out.logits, heads.forward(model, tokens_BT).logits)


def test_what_does_not_fit_is_refused(run_check, model, toy, tmp_path):
    folder = tmp_path / "trained"
    save_trained(folder, heads_of(model, "hedgehog", 0.0, 0.1))
    outcome = run_check(f"--recipe={folder}", "--n=2", model=toy("gpt2"))
    assert outcome.code == 3
    assert "the heads were found on tiny with weights" in outcome.err[-1]
    for flags in (["--hybrid=new.json", "--text=essays"], ["--diagnose", "--text=essays"]):
        (line,) = run_check(f"--recipe={folder}", *flags).refusals
        assert "is a folder of trained heads, which --hybrid and --diagnose do not take" in line
    (line,) = run_check(f"--recipe={tmp_path}").refusals
    assert "has no trained.json; name the folder trained/" in line
    (line,) = run_check(f"--recipe={tmp_path / 'none'}").refusals
    assert "is no folder; name the folder trained/" in line
    save_trained(tmp_path / "softmax", heads_of(model, "softmax", 0.0, 0.1))
    (line,) = run_check(f"--recipe={tmp_path / 'softmax'}", "--n=2").refusals
    assert "were trained under softmax" in line


def test_a_folder_that_was_trained_on_is_another_check(model, tmp_path):
    digests = []
    for size in (0.1, 0.2):
        folder = tmp_path / f"{size}" / "trained"
        folder.parent.mkdir()
        save_trained(folder, heads_of(model, "hedgehog", 0.0, size))
        digests.append(CheckConfig(model="tiny", recipe=str(folder)).files["--recipe"])
    assert digests[0] != digests[1]
