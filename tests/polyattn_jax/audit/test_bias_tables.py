"""A bias of every head or layer equals that of sorting its own rows, and runs where it is named."""

import dataclasses
import json
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run.files import write_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.results import load_result
import polyattn_jax
from polyattn_jax.audit import bias_tables, model_calibration, opening, recipe_rows
from polyattn_jax.audit.bias_tables import BiasTable
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes import calibrate
from polyattn_jax.recipes.calibrate import MassBelow
from polyattn_jax.recipes.row_maps import parse_recipe, relu_power, resolve_bias
from polyattn_jax.recipes.substitute import substitute
from tests.polyattn_jax.recipes.test_calibrate import causal, numpy_measure
from tests.polyattn_jax.studies.test_check import fields

L, N, LENGTH = 3, 4, 64


def measure_each(scores_HTS):
    """M(t) in float64 of every head, at thresholds of its own."""

    def measure(thresholds_HM):
        each = [numpy_measure(s)(t) for s, t in zip(scores_HTS, thresholds_HM, strict=True)]
        return MassBelow(np.array([m.total_M for m in each]), np.array([m.rows for m in each]))

    return measure


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    rounding=st.booleans(),
    budget=st.sampled_from([0.0, 0.0517, 0.973]),
)
def test_each_set_of_rows_is_solved_as_if_alone(seed, scale, rounding, budget):
    rng = np.random.default_rng(seed)
    level = rng.normal(0, 30, (5, 1, 1))
    scores = causal(rng.standard_normal((5, 6, 6)) * scale + level).astype(np.float32)
    if rounding:  # bfloat16 scores tie often
        scores = np.asarray(jnp.asarray(scores, jnp.bfloat16), np.float32)
    got = calibrate.calibrate_each(measure_each(scores), (5,), budget=budget, num_thresholds=64)
    want = [calibrate.exact_bias(one, budget=budget) for one in scores]
    np.testing.assert_array_equal(got.bias, want)
    np.testing.assert_array_equal(got.rows, 6)
    assert (got.mass <= budget).all()


def test_masses_of_heads_are_those_of_their_rows():
    rng = np.random.default_rng(0)
    scores_BNTS = causal(rng.standard_normal((2, 3, 8, 8)) * 2).astype(np.float32)
    thresholds_NM = np.sort(rng.standard_normal((3, 9)), -1).astype(np.float32)
    got = jax.jit(calibrate.mass_below_by_head)(scores_BNTS, thresholds_NM)
    for b, n in np.ndindex(2, 3):
        want = numpy_measure(scores_BNTS[b, n])(thresholds_NM[n])
        # Weights of float32, sums of positive ones over at most 8 keys and 8 rows.
        bound = (8 + 8 + 40) * 2.0**-24
        np.testing.assert_allclose(got.total_M[b, n], want.total_M, rtol=bound, atol=bound)
        assert got.rows[b, n] == want.rows


@pytest.fixture(scope="module")
def checked(run_check, tmp_path_factory):
    """The folders of checks at a bias of every head and of every layer."""
    folder = tmp_path_factory.mktemp("biases")
    for level in ("head", "layer"):
        flags = [f"--recipe=relu:p=4,b=auto_{level}", f"--workdir={folder / level}"]
        outcome = run_check(*flags)
        assert outcome.code in (0, 10, 11), outcome.err
        (folder / f"{level}.txt").write_text(outcome.out)
    return folder


@pytest.fixture(scope="module")
def text_scores(tiny):
    """The score rows of the calibration texts, `[L, text, N, T, T]`."""
    model = lm_jax.load_pretrained(tiny)
    ids = [model.tokenizer.encode(text) for text in model_calibration.calibration_texts().values()]
    tokens_BT = jnp.asarray([one[:LENGTH] for one in ids])
    record = {"attn.scores": lm_jax.keep}
    out = lm_jax.forward(model.params, tokens_BT, model.cfg, record=record)
    return np.asarray(out.records["attn.scores"])


@pytest.mark.parametrize("level", ["head", "layer"])
def test_the_rule_holds_for_the_rows_of_each_head_or_layer(checked, text_scores, level):
    table = load_result(checked / level / f"calibration_{level}.json", BiasTable)
    assert (table.level, table.length, table.texts) == (level, LENGTH, 8)
    biases = np.array(table.biases)
    assert biases.shape == (L, N)
    heads = [[n] for n in range(N)] if level == "head" else [list(range(N))]
    assert table.rows == 8 * LENGTH * len(heads[0])
    # Masses are of float32: of a row a sum of weights, then a sum of rows and of texts.
    bound = (2 * LENGTH + 8 + 40) * 2.0**-24
    # A score comes out of at most ten products, each a sum of 64 terms or fewer, so that two
    # programs differ by twice as many roundings of the largest.
    apart = 2 * 10 * 64 * 2.0**-24 * np.abs(text_scores[np.isfinite(text_scores)]).max()
    for layer in range(L):
        for own in heads:
            (bias,) = set(biases[layer, own])
            scores = text_scores[layer][:, own]
            measured = numpy_measure(scores)([-bias - apart, -bias + apart])
            at, beyond = measured.total_M / measured.rows
            assert at <= 0.05 * np.exp(2 * apart) + bound
            assert beyond > 0.05 * np.exp(-2 * apart) - bound
            assert np.abs(scores[np.isfinite(scores)] + bias).min() <= apart
            assert table.mass[layer][own[0]] <= 0.05
    assert len(set(biases.ravel().tolist())) == (L * N if level == "head" else L)


def test_a_check_measures_rows_at_the_bias_of_their_head(checked, tiny):
    result = json.loads((checked / "head" / "summary.json").read_text())
    table = load_result(checked / "head" / "calibration_head.json", BiasTable)
    assert result["bias"] == [list(row) for row in table.biases]
    printed = fields((checked / "head.txt").read_text())
    assert printed["bias"][-2:] == ["by", "head"]
    assert "rows with S_4 >= 1, dead or not" in printed
    model = lm_jax.load_pretrained(tiny)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (1, 20)))
    queries_BQ = jnp.asarray([[7, 19]])
    row_map = parse_recipe("relu:p=4").map
    biases = np.array(table.biases)
    got = recipe_rows.measure(
        model.params, tokens_BT, queries_BQ, biases[None], cfg=model.cfg, maps=(row_map,)
    )
    record = {"attn.scores": lm_jax.keep}
    scores = lm_jax.forward(model.params, tokens_BT, model.cfg, record=record).records[
        "attn.scores"
    ]
    for layer, n in np.ndindex(L, N):
        rows = np.asarray(scores[layer, 0, n])[[7, 19]]
        want = polyattn_jax.row_stats(rows, degrees=(4,), bias=biases[layer, n])
        bound = polyattn_jax.recipes.diagnostic.relative_error_bound(4, 20)
        ours = np.asarray(got["s_own"][layer, 0, 0, n])
        # Scores of two programs are `apart`, and (r_j / r_*)^4 <= 1 moves by 8 apart / r_*.
        apart = 2 * 10 * 64 * 2.0**-24 * np.abs(rows[np.isfinite(rows)]).max()
        live = want.s_p[:, 0] < np.inf
        error = 20 * 8 * apart / want.r_star[live] + 2 * bound * want.s_p[live, 0]
        assert (np.abs(ours[live] - want.s_p[live, 0]) <= error).all()
        np.testing.assert_array_equal(got["status"][layer, 0, 0, n], want.status)


def test_a_file_gives_the_numbers_of_the_calibration_that_wrote_it(checked, run_check, tmp_path):
    path = checked / "head" / "calibration_head.json"
    again = run_check(f"--recipe=relu:p=4,b={path}", f"--workdir={tmp_path / 'run'}")
    assert again.code in (0, 10, 11), again.err
    first = json.loads((checked / "head" / "summary.json").read_text())
    second = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert second.pop("recipe") == f"relu:p=4,b={path}"
    for name in ("recipe", "provenance", "linear"):
        first.pop(name), second.pop(name, None)
    assert first["against_softmax"].pop("bias_kind") == "auto_head"
    assert second["against_softmax"].pop("bias_kind") == "calibration_head"
    assert first == second
    held = json.loads(path.read_text())
    short = tmp_path / "short.json"
    short.write_text(json.dumps(held | {"biases": held["biases"][:2]}))
    (line,) = run_check(f"--recipe=relu:p=4,b={short}").refusals
    assert "the model has 3 layers of 4 heads, and biases another number" in line
    (line,) = run_check(f"--recipe=relu:p=4,b={tmp_path / 'none.json'}").refusals
    assert "none.json" in line


def test_a_bias_of_other_weights_is_refused(checked, run_check, tmp_path):
    held = json.loads((checked / "head" / "calibration_head.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(held | {"model_sha256": "f" * 64}))
    (line,) = run_check(f"--recipe=relu:p=4,b={other}").refusals
    assert "model_sha256 is not that of config.model: weights ffffffffffff, not" in line
    assert "calibrate one by b=auto_head" in line


def test_a_calibration_of_other_settings_is_not_taken(tmp_path):
    """Whatever the folder holds is compared before it is used, without a pass over the model."""
    at = calibrate.AtLength(64, 1.0, 1.0, 1.0, 1.0, 1.0)
    stored = calibrate.Calibration(
        *(1.0, 1.0, 1.0, 0.05, 64, 8, 512, 3, 0.1, (at,), 0.05, "a" * 64, "float32")
    )
    table = BiasTable("head", "a" * 64, 0.05, 64, 8, 512, 3, ((1.0,),), ((0.05,),), dtype="float32")
    write_json(tmp_path / "calibration.json", stored)
    write_json(tmp_path / "calibration_head.json", table)
    own = AuditConfig("x", niah_lengths=(64,), sweep_length=64)

    def read(config, sha256="a" * 64):
        model = SimpleNamespace(identity=ModelIdentity(sha256))
        audited = SimpleNamespace(model=model, config=config)
        return (
            lambda: model_calibration.calibrated(audited, tmp_path),
            lambda: bias_tables.of_level(audited, tmp_path, "head"),
        )

    assert [found() for found in read(own)] == [stored, table]
    for config, sha256, words in (
        (dataclasses.replace(own, calibration_length=32), "a" * 64, "length is 64, and 32 in"),
        (dataclasses.replace(own, budget=0.1), "a" * 64, "budget is 0.05, and 0.1 in"),
        (dataclasses.replace(own, dtype="bfloat16"), "a" * 64, "dtype is 'float32', and"),
        (own, "b" * 64, "another model: weights aaaaaaaaaaaa, not bbbb"),
    ):
        for found in read(config, sha256):
            with pytest.raises(BadInputError, match=f"{words}.*remove the file to calibrate again"):
                found()


def test_the_bias_of_the_ablation_is_part_of_what_rows_depend_on(tmp_path):
    path = tmp_path / "mine.json"
    config = AuditConfig("x", ablation_recipe=f"relu:p=2,b={path}")
    model = SimpleNamespace(identity=ModelIdentity("a" * 64))
    audited = SimpleNamespace(model=model, config=config)
    path.write_text("1")
    first = opening.fingerprint(audited, {})
    path.write_text("2")
    assert opening.fingerprint(audited, {}) != first


def test_a_table_is_the_bias_of_each_head(checked, tiny):
    table = load_result(checked / "head" / "calibration_head.json", BiasTable)
    biases = jnp.asarray(table.biases, jnp.float32)
    model = lm_jax.load_pretrained(tiny)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 12)))
    record = {"attn.scores": lm_jax.keep, "attn.pattern": lm_jax.keep}

    def run(attend):
        return lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend, record=record)

    attend = substitute([relu_power(4)], 0, biases, jnp.ones((L, N), bool))
    got = run(attend)
    for layer, n in np.ndindex(L, N):
        scores = got.records["attn.scores"][layer, :, n]
        want = relu_power(4)(scores, biases[layer, n])
        np.testing.assert_array_equal(got.records["attn.pattern"][layer, :, n], want)
    named = polyattn_jax.recipe("relu:p=4,b=auto_head", bias=biases)
    np.testing.assert_array_equal(run(named).logits, got.logits)
    same = substitute([relu_power(4)], 0, jnp.full((L, N), 0.5), jnp.ones((L, N), bool))
    one = substitute([relu_power(4)], 0, 0.5, jnp.ones((L, N), bool))
    np.testing.assert_array_equal(run(same).logits, run(one).logits)


def test_a_hybrid_keeps_the_biases_of_its_heads(checked, tiny, tmp_path):
    table = load_result(checked / "head" / "calibration_head.json", BiasTable)
    biases = [list(row) for row in table.biases]
    path = tmp_path / "heads.json"
    held = {
        "version": 1,
        "model": "tiny",
        "model_sha256": lm_jax.load_pretrained(tiny).sha256,
        "recipe": "relu:p=4,b=auto_head",
        "bias": biases,
        "layers": L,
        "heads": N,
        "replaced": [[0, 1], [2, 3]],
    }
    path.write_text(json.dumps(held))
    model = lm_jax.load_pretrained(tiny)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 12)))
    heads_LN = np.zeros((L, N), bool)
    heads_LN[[0, 2], [1, 3]] = True
    want = substitute([relu_power(4)], 0, jnp.asarray(biases), jnp.asarray(heads_LN))
    got = [
        lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend).logits
        for attend in (polyattn_jax.load_recipe(path, model), want)
    ]
    np.testing.assert_array_equal(*got)
    path.write_text(json.dumps(held | {"bias": biases[:2]}))
    with pytest.raises(CorruptError, match="bias must be a number, or 3 rows of 4"):
        polyattn_jax.load_recipe(path, model)


@pytest.mark.parametrize(
    "spec", ["relu:p=4,b=auto_head", "relu:p=2,b=x/y.json", "sigmoid:b=auto_layer"]
)
def test_a_table_is_named_in_its_recipe(spec):
    recipe = parse_recipe(spec)
    assert recipe.tabled and recipe.degree is None and parse_recipe(recipe.spec) == recipe
    assert recipe_rows.measured(recipe)
    with pytest.raises(UsageError, match=r"needs a calibrated bias; pass one or write b=<number>"):
        resolve_bias(recipe, 1.0)
    np.testing.assert_array_equal(resolve_bias(recipe, {recipe.bias: np.ones((2, 2))}), 1)
    with pytest.raises(UsageError, match="bias has shape"):
        substitute([recipe.map], 0, jnp.ones((2, 3)), jnp.ones((2, 2), bool))


def test_a_bias_in_words():
    assert bias_tables.describe(1.25) == "1.25"
    assert bias_tables.describe(((1.0, -2.0), (3.0, 0.0))) == "-2 to 3 by head"
