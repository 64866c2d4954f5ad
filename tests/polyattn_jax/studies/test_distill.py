"""A training of replaced heads: what its mixers compute, what it repairs, resuming, the report."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

import lm_jax
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.lora import LoraConfig
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.statistics import Interval
from lm_jax.study import Work, frame
from lm_jax.study import command as study_command
from lm_jax.train.objective import LMBatch
import polyattn_jax
from polyattn_jax.audit.bias_tables import DistanceTable
from polyattn_jax.recipes.row_maps import parse_recipe, relu_power
from polyattn_jax.recipes.substitute import substitute
from polyattn_jax.recipes.trained_attention import HYBRID, MATCHED, outweighed
from polyattn_jax.studies.distill import STUDY, report
from polyattn_jax.studies.distill import run as distill
from polyattn_jax.studies.distill.matching import HeadMatching
from polyattn_jax.studies.distill.numbers import rank_correlation
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.settings import DistillConfig
from tests import tiny
from tests.polyattn_jax.conftest import write_documents

# Run by `make test-all`.
pytestmark = pytest.mark.long

L, N, K, B, T, H = 2, 4, 2, 2, 9, 6
CFG = tiny.GROUPED
REPLACED = ((0, 1), (1, 0), (1, 3))
BIAS = 0.75
WINDOWED = "hedgehog:w=3,sinks=1"
U = 2.0**-24


def objective(recipe="relu:p=2", replaced=REPLACED, bias=BIAS):
    adapters = LoraConfig(rank=2, alpha=4.0, targets=("q", "k"))
    return HeadMatching(CFG, parse_recipe(recipe).map, bias, replaced, adapters)


@pytest.fixture(scope="module")
def frozen():
    params = tiny.params(CFG)
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    return params | {"blocks": blocks}


@pytest.fixture(scope="module")
def batch():
    tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)
    valid_BT = jnp.arange(T)[None] < jnp.array([[T], [6]])
    return LMBatch(tokens_BT, valid_BT, jnp.roll(tokens_BT, -1, 1), valid_BT)


def fresh(one):
    return params_lib.init(jax.random.key(0), one.spec)


def moved(one):
    """Parameters that differ from those at the start everywhere."""
    shift = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)  # noqa: E731
    return jax.tree.map(shift, fresh(one))


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog", "performer:m=8", WINDOWED, "gdn"])
def test_the_frozen_model_is_softmax_whatever_is_trained(frozen, batch, recipe):
    one = objective(recipe)
    matched = one.run(moved(one), frozen, batch, mixer=MATCHED)
    plain = lm_jax.forward(frozen, batch.input_BT, CFG, valid_BT=batch.input_mask_BT)
    np.testing.assert_array_equal(matched.hidden, plain.hidden)


def test_the_error_of_a_head_is_that_of_its_output_on_the_frozen_stream(frozen, batch):
    one = objective()
    out = one.run(fresh(one), frozen, batch, mixer=MATCHED, queries=(3, 5))
    names = ("attn.scores", "attn.pattern", "attn.v", "attn.z")
    record = dict.fromkeys(names, lm_jax.keep)
    base = lm_jax.forward(frozen, batch.input_BT, CFG, record=record).records
    valid = np.asarray(batch.input_mask_BT)
    for layer in range(L):
        r = np.maximum(np.float64(base["attn.scores"][layer]) + BIAS, 0)
        weight = r**2
        total = weight.sum(-1, keepdims=True)
        pattern = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
        v = np.float64(base["attn.v"][layer]).repeat(N // K, axis=2)
        z = np.einsum("BNTS,BSNH->BTNH", pattern, v)
        before = np.float64(base["attn.z"][layer])
        error = ((z - before) ** 2).sum(-1) * valid[..., None]
        size = (np.abs(z) + np.abs(before)).max()
        # A weight has about 40 roundings and a product T terms; squares are summed over T and H.
        bound = 4 * (2 * T + 40 + H) * U * size**2 * T * H
        np.testing.assert_allclose(out.aux["error_BN"][layer], error.sum(1), atol=bound)
        energy = (before**2).sum(-1) * valid[..., None]
        np.testing.assert_allclose(out.aux["energy_BN"][layer], energy.sum(1), atol=bound)
        for at, q in enumerate((3, 5)):
            target = np.asarray(base["attn.pattern"][layer][:, :, q]).argmax(-1)[..., None]
            mass = np.take_along_axis(pattern[:, :, q], target, -1)[..., 0]
            with np.errstate(divide="ignore"):
                want = np.where(mass > 0, (pattern[:, :, q].sum(-1) - mass) / mass, np.inf)
            got = out.aux["s_BNQ"][layer, :, :, at]
            np.testing.assert_allclose(got, want, rtol=(2 * T + 100) * U, atol=1e-12)


def test_the_hybrid_before_training_is_the_substitution(frozen, batch):
    one = objective()
    hybrid = one.run(fresh(one), frozen, batch, mixer=HYBRID)
    attend = substitute([relu_power(2)], 0, BIAS, jnp.asarray(one.heads_LN))
    wanted = lm_jax.forward(frozen, batch.input_BT, CFG, attend=attend)
    np.testing.assert_array_equal(hybrid.hidden, wanted.hidden)


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog", WINDOWED])
def test_trained_queries_and_keys_are_read_by_replaced_heads_alone(frozen, batch, recipe):
    """Head 1 writes nothing here, so that head 0, which has the same keys, would show a change."""
    one = objective(recipe, replaced=((0, 1),))
    mixer = frozen["blocks"]["mixer"]
    silent = frozen | {
        "blocks": frozen["blocks"] | {"mixer": mixer | {"o": mixer["o"].at[0, 1].set(0)}}
    }
    plain = lm_jax.forward(silent, batch.input_BT, CFG).hidden
    hybrid = one.run(moved(one), silent, batch, mixer=HYBRID).hidden
    np.testing.assert_array_equal(hybrid, plain)
    assert np.abs(one.run(moved(one), frozen, batch, mixer=HYBRID).hidden - plain).max() > 1e-3


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog", WINDOWED, "gdn"])
def test_a_cache_gives_the_logits_of_whole_rows(frozen, batch, recipe):
    """Six tokens at once and the others one by one; both mixers, adapters and matrices."""
    one = objective(recipe)
    params = moved(one)
    weights, attend = one.weights_and_attend(params, frozen)
    whole = one.run(params, frozen, ids_alone(batch.input_BT), mixer=HYBRID).logits
    cache = lm_jax.init_cache(CFG, B, T, mixer=HYBRID)
    run = functools.partial(lm_jax.forward, weights, cfg=CFG, attend=attend, mixer=HYBRID)
    parts = []
    for tokens_BT in (batch.input_BT[:, :6], *np.split(batch.input_BT[:, 6:], T - 6, axis=1)):
        out = run(tokens_BT, cache=cache)
        cache = out.cache
        parts.append(out.logits)
    # Logits of some units, after two layers of sums of at most 60 products in another order.
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5, rtol=2e-5)


def test_a_hybrid_generates_what_it_reads_where_rotations_go_by_length(frozen):
    """The keys of both mixers, across the first context of LongRoPE, in rows of two lengths."""
    scaling = lm_jax.LongRopeScaling((1.0, 1.5, 2.0), (4.0, 7.0, 9.0), 5, 1.3)
    cfg = dataclasses.replace(CFG, rope=lm_jax.Rope(theta=10.0, scaling=scaling))
    one = dataclasses.replace(objective(), cfg=cfg)
    weights, attend = one.weights_and_attend(moved(one), frozen)
    run = jax.jit(functools.partial(lm_jax.forward, cfg=cfg, mixer=HYBRID))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]]
    got = lm_jax.generate(weights, prompts, cfg, max_new_tokens=2, attend=attend, mixer=HYBRID)
    for prompt, continuation in zip(prompts, got, strict=True):
        for count, token in enumerate(continuation):
            ids = jnp.array([[*prompt, *continuation[:count]]])
            assert int(run(weights, ids, attend=attend).logits[0, -1].argmax()) == token


def ids_alone(tokens_BT):
    return LMBatch(tokens_BT, *[jnp.ones(tokens_BT.shape, bool)] * 3)


@pytest.mark.parametrize("recipe", ["relu:p=2", "hedgehog", WINDOWED, "gdn"])
def test_a_layer_is_trained_by_its_own_heads(frozen, batch, recipe):
    one = objective(recipe, replaced=((1, 2),))
    tokens_BS = jnp.pad(batch.input_BT, ((0, 0), (0, 1)), constant_values=-1)
    loss = lambda p: one.loss_terms(p, frozen, None, tokens_BS, {}, jax.random.key(0))[0]  # noqa: E731
    gradient = jax.grad(loss)(moved(one))
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all() and not np.any(leaf[0]) and np.any(leaf[1])
    if one.trains_maps:
        # Head 2 has its own W of queries, and that of keys of KV head 1.
        assert not np.any(gradient["maps"]["q"][1, [0, 1, 3]])
        assert not np.any(gradient["maps"]["k"][1, 0]) and np.any(gradient["maps"]["k"][1, 1])


def test_what_cannot_be_run_is_refused(frozen, batch):
    with pytest.raises(UsageError, match="no head is replaced"):
        objective(replaced=())
    with pytest.raises(UsageError, match="need the attend of a Student"):
        lm_jax.forward(frozen, batch.input_BT, CFG, mixer=HYBRID)
    with pytest.raises(UsageError, match="may name q and k only"):
        DistillConfig(adapters=LoraConfig(targets=("q", "v")))
    unlike = dataclasses.replace(CFG, block_end=lm_jax.BlockEnd())
    with pytest.raises(UsageError, match="distill: training of replaced heads cannot take family"):
        HeadMatching(unlike, relu_power(4), 0.0, ((0, 0),))


def test_a_target_without_weight_is_outweighed():
    rows = jnp.array([[[[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]]]])
    target = jnp.array([[[2, 2]]])
    np.testing.assert_array_equal(outweighed(rows, target), [[[3.0, np.inf]]])


def test_the_rank_correlation_is_spearmans_and_resamples_heads():
    rng = np.random.default_rng(0)
    first = rng.random(40)
    second = first + 0.3 * rng.random(40)
    config = DistillConfig()
    got = rank_correlation(list(first), list(second), config=config)
    assert got.estimate == pytest.approx(stats.spearmanr(first, second).statistic)
    assert got.n == 40 and got.low < got.estimate < got.high <= 1
    assert rank_correlation([0.5] * 9, list(second[:9]), config=config) is None
    assert rank_correlation([0.1, 0.2], [1.0, 2.0], config=config) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text") / "documents")


def settings(model, text, **changes):
    config = ConfigDict(dataclasses.asdict(DistillConfig()))
    config.corpus.update({"source": str(text), "splits": (0.7, 0.3, 0.0), "max_tokens": 0})
    config.adapters.update({"rank": 4, "alpha": 8.0})
    config.update(
        {
            "model": str(model),
            "context": 32,
            "batch_size": 8,
            "steps": 30,
            "learning_rate": 3e-2,
            "eval_every": 15,
            "save_every": 7,
            "resamples": 200,
            **changes,
        }
    )
    return config


@pytest.fixture(scope="module")
def trained(tiny, text, tmp_path_factory):
    """The folder of a run of the toy model."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    frame.execute(STUDY, settings(tiny, text), folder)
    return folder


def test_training_lowers_the_error_on_text_that_it_did_not_see(trained):
    summary = load_result(trained / "summary.json", DistillSummary)
    assert summary.error_change.high < 0
    assert summary.error_after.estimate < 0.8 * summary.error_before.estimate
    assert (summary.layers, summary.heads, summary.replaced, summary.steps) == (3, 4, 12, 30)
    evaluations = pq.read_table(trained / "train" / "evaluations.parquet").to_pylist()
    errors = [row["value"] for row in evaluations if row["name"] == "validation/loss"]
    assert len(errors) == 2 and errors[1] < errors[0]


def test_the_summary_is_that_of_the_tables(trained):
    summary = load_result(trained / "summary.json", DistillSummary)
    heads = pq.read_table(trained / "rows.parquet").to_pylist()
    assert [(row["layer"], row["head"]) for row in heads] == list(np.ndindex(3, 4))
    for row, head in zip(heads, summary.by_head, strict=True):
        assert row.pop("replaced")
        assert row == dataclasses.asdict(head)
    losses = pq.read_table(trained / "losses.parquet").to_pydict()
    tokens = sum(losses["tokens"])
    assert (tokens, len(losses["tokens"])) == (summary.tokens, summary.windows)
    for name, base, shown in (
        ("before", "softmax", summary.before),
        ("after", "softmax", summary.after),
        ("after", "before", summary.change),
    ):
        change = (np.sum(losses[name]) - np.sum(losses[base])) / tokens
        assert shown.estimate == pytest.approx(change, abs=1e-9)
        assert shown.low <= change <= shown.high and shown.n == summary.documents
    safe = [head.safe_before for head in summary.by_head]
    repaired = [1 - head.error_after / head.error_before for head in summary.by_head]
    want = stats.spearmanr(safe, repaired).statistic
    assert summary.repair_rank.estimate == pytest.approx(want)
    for low, high, words in (
        (0.4, 0.9, "Yes, safer heads"),
        (-0.3, -0.1, "Only a little, less safe heads"),
        (-0.1, 0.9, "Not shown"),
    ):
        rank = Interval((low + high) / 2, low, high, 12)
        assert words in report.answer(dataclasses.replace(summary, repair_rank=rank))
    assert "Nothing to rank" in report.answer(dataclasses.replace(summary, repair_rank=None))
    text = report.format_summary(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert report.QUESTION.split()[0] in text
    page = (trained / "report.html").read_text("utf-8")
    assert report.QUESTION in page and f"{summary.error_after.estimate:.3g}" in page


def test_the_trained_heads_are_a_folder_that_another_program_runs(trained, tiny, text, tmp_path):
    heads = polyattn_jax.load_trained(trained / "trained")
    model = lm_jax.load_pretrained(tiny)
    summary = load_result(trained / "summary.json", DistillSummary)
    assert (heads.hybrid.replaced, heads.hybrid.bias) == (tuple(np.ndindex(3, 4)), summary.bias)
    config = from_plain(settings(tiny, text), DistillConfig)
    task = distill.open_task(config, trained)
    after = distill.measure(task, heads.objective(model), heads.params)
    losses = pq.read_table(trained / "losses.parquet")["after"].to_numpy()
    np.testing.assert_array_equal(distill.loss_table(after, after)["after"].to_numpy(), losses)
    tokens_BT = jnp.asarray(task.validation.at(0)["tokens"][:2, :-1])
    out = heads.forward(model, tokens_BT)
    want = heads.objective(model).run(
        heads.params, model.params, ids_alone(tokens_BT), mixer=HYBRID
    )
    np.testing.assert_array_equal(out.logits, want.logits)
    # Padding on the right changes nothing before it.
    valid_BT = jnp.arange(tokens_BT.shape[1])[None] < 5
    padded = heads.forward(model, tokens_BT, valid_BT=jnp.repeat(valid_BT, 2, 0))
    np.testing.assert_allclose(padded.logits[:, :5], out.logits[:, :5], atol=1e-5)

    # Greedy decoding writes what the forward pass would.
    prompts = [tokens_BT[0, :6].tolist(), tokens_BT[1, :4].tolist()]
    for prompt, new in zip(prompts, heads.generate(model, prompts, max_new_tokens=3), strict=True):
        logits = heads.forward(model, jnp.asarray([prompt + new])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new

    hybrid = dataclasses.replace(heads.hybrid, model_sha256="0" * 64)
    with pytest.raises(BadInputError, match=r"with weights 000000000000, .* load them with"):
        dataclasses.replace(heads, hybrid=hybrid).forward(model, tokens_BT)
    with pytest.raises(BadInputError, match="name the folder trained/"):
        polyattn_jax.load_trained(trained)
    damaged = tmp_path / "trained"
    shutil.copytree(trained / "trained", damaged)
    file = damaged / "trained.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"trained\.safetensors is not the file"):
        polyattn_jax.load_trained(damaged)


def test_too_few_documents_are_refused_before_training(tiny, text, tmp_path):
    with pytest.raises(UsageError, match=r"config\.validation_documents = 1 must be at least 2"):
        DistillConfig(validation_documents=1)
    few = tmp_path / "few"
    few.mkdir()
    for file in sorted(text.iterdir())[:9]:
        shutil.copy(file, few)
    config = settings(tiny, few)
    config.corpus.splits = (0.8, 0.2, 0.0)
    with pytest.raises(BadInputError, match="1 document of the validation split has a window"):
        distill.open_task(from_plain(config, DistillConfig), tmp_path / "run")


def test_what_was_trained_is_saved_before_it_is_measured(
    trained, tiny, text, tmp_path, monkeypatch
):
    """A failure of the measurement costs no training."""
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(folder / "trained")

    def fail(*args):
        raise BadInputError("no interval")

    monkeypatch.setattr(distill, "measure", fail)
    with pytest.raises(BadInputError, match="no interval"):
        distill.train_and_measure(from_plain(settings(tiny, text), DistillConfig), Work(folder, ""))
    first, second = (polyattn_jax.load_trained(f / "trained") for f in (trained, folder))
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


@pytest.mark.parametrize("recipe", ["hedgehog", WINDOWED])
def test_the_smoke_mode_trains_a_feature_map_in_the_heads_of_a_hybrid(
    recipe, tiny, text, tmp_path, capsys
):
    sha256 = lm_jax.load_pretrained(tiny).sha256
    held = {
        "version": 1,
        "model": "tiny",
        "model_sha256": sha256,
        "recipe": recipe,
        "bias": 0.0,
        "layers": 3,
        "heads": 4,
        "replaced": [[0, 1], [1, 0], [2, 2], [2, 3]],
    }
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps(held))
    argv = [
        "distill",
        "--config=polyattn/distill:smoke",
        f"--config.model={tiny}",
        f"--config.hybrid={heads}",
        f"--config.corpus.source={text}",
        f"--workdir={tmp_path / 'run'}",
    ]
    assert study_command.run(STUDY, argv) == 0
    summary = load_result(tmp_path / "run" / "summary.json", DistillSummary)
    assert [(h.layer, h.head) for h in summary.by_head] == [tuple(x) for x in held["replaced"]]
    assert summary.trained == "matrices of the feature map"
    assert summary.parameters == 3 * (4 + 2) * 16**2
    trained = polyattn_jax.load_trained(tmp_path / "run" / "trained")
    assert trained.hybrid.recipe == recipe and trained.hybrid.model_sha256.startswith(sha256)
    assert jax.tree.map(np.shape, trained.params) == {
        "maps": {"q": (3, 4, 16, 16), "k": (3, 2, 16, 16)}
    }
    assert "Does the safe share predict" in capsys.readouterr().out
    heads.write_text(json.dumps(held | {"model_sha256": "0" * 64}))
    with pytest.raises(BadInputError, match="found on tiny with weights 0000"):
        distill.open_task(
            from_plain(settings(tiny, text, hybrid=str(heads)), DistillConfig),
            tmp_path / "other",
        )


def test_a_recipe_without_an_s_is_trained_at_measured_distances(tiny, text, tmp_path, capsys):
    argv = [
        "distill",
        "--config=polyattn/distill:smoke",
        f"--config.model={tiny}",
        "--config.recipe=gdn",
        f"--config.corpus.source={text}",
        f"--workdir={tmp_path / 'run'}",
    ]
    assert study_command.run(STUDY, argv) == 0
    summary = load_result(tmp_path / "run" / "summary.json", DistillSummary)
    held = load_result(tmp_path / "run" / "calibration_distance.json", DistanceTable)
    assert summary.bias == held.distances
    assert {(h.safe_before, h.safe_after) for h in summary.by_head} == {(None, None)}
    assert all(np.isnan([h.s_before, h.s_after]).all() for h in summary.by_head)
    assert summary.repair_rank is None
    words = " ".join(capsys.readouterr().out.split())
    assert "S is not defined for this map, whose weights may be negative." in words
    assert "(distance = " in words and "safe share and" not in words
    trained = polyattn_jax.load_trained(tmp_path / "run" / "trained")
    assert trained.hybrid.recipe == "gdn" and trained.hybrid.bias == held.distances
