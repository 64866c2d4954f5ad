"""A whole audit of a tiny model: its rows against an oracle, its summary against its own rows."""

import functools
import json

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import BadInputError
from lm_jax.run.files import read_json
from polyattn_jax.audit import head_sets, measure, schema
from polyattn_jax.audit.audited_model import load
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.recipes.row_maps import parse_recipe
from tests.polyattn_jax import audit_oracle
from tests.polyattn_jax.conftest import HOPELESS

# Run by `make test-all`.
pytestmark = pytest.mark.long

L, N = 3, 4
PROMPTS = {"niah_64": 7, "induction": 4, "mqar": 3}


TABLES = ("rows", "answers", "heads", "head_sets")
SETS = [("top", ""), ("bottom", ""), ("random", "-0")]
KEY = ["suite", "prompt", "layer", "head", "query", "target", "bias_kind"]
ANSWER_KEY = ["stage", "cell", "suite", "prompt"]


def table(folder, name="rows"):
    return pq.read_table(folder / f"{name}.parquet")


def by_key(rows, key=KEY):
    """Rows in an order that does not depend on how they were batched, as columns."""
    ordered = rows.sort_by([(name, "ascending") for name in key])
    return {name: ordered[name].to_numpy(zero_copy_only=False) for name in ordered.column_names}


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def place_of(row):
    """Where `audit_oracle.rows_of` has a line of `rows.parquet`."""
    return row["prompt"], row["layer"], row["head"]


@pytest.fixture(scope="module")
def audited_model(tiny, haystack):
    config = AuditConfig(
        model=str(tiny),
        haystack=str(haystack),
        niah_lengths=(64,),
        sweep_length=64,
        niah_n=7,
        induction_length=64,
        induction_n=4,
        mqar_length=64,
        mqar_n=3,
        repeated_n=1,
        calibration_length=64,
    )
    return load(config)


@pytest.fixture(scope="module")
def expected_rows(audited_model):
    return {suite: audit_oracle.rows_of(audited_model, suite) for suite in PROMPTS}


@pytest.fixture(scope="module")
def expected_answers(audited_model):
    return audit_oracle.Answers(audited_model)


@pytest.fixture(scope="module")
def bias_limits(audited_model):
    return audit_oracle.bias_limits(audited_model)


def test_files_schema_and_number_of_rows(audited):
    names = {path.name for path in audited.iterdir()}
    assert {"config.json", "provenance.json", "suites.json", "calibration.json"} <= names
    assert {"heads.parquet", "summary.json", "finished.json", "log.txt"} <= names
    rows, answers = table(audited), table(audited, "answers")
    model = pa.field("model", pa.string())
    assert rows.schema.remove_metadata() == pa.schema(
        [model, *schema.ROWS, pa.field("head_type", pa.string())]
    )
    assert answers.schema.remove_metadata() == pa.schema([model, *schema.ANSWERS])
    # Two biases and two kinds of target, for there is one query and each suite has its answer.
    assert rows.num_rows == L * N * 2 * 2 * sum(PROMPTS.values())
    assert rows.select(KEY).group_by(KEY).aggregate([]).num_rows == rows.num_rows
    # Control: needle and none. Sweep: softmax and 4 recipes. Ablation: softmax, 2 sizes x 3 sets.
    assert answers.num_rows == (7 + 3) + 7 * 5 + 4 * 7


def test_files_of_two_models_can_be_merged(audited, tiny):
    for name in TABLES:
        assert set(table(audited, name)["model"].to_pylist()) == {tiny.name}


@pytest.mark.parametrize("suite", PROMPTS)
def test_rows_equal_a_float64_oracle_within_its_limits(audited, expected_rows, suite):
    rows = [row for row in table(audited).to_pylist() if row["suite"] == suite]
    expected = expected_rows[suite]
    sure = [audit_oracle.assert_row(row, expected[place_of(row)]) for row in rows]
    assert np.mean(sure) > 0.99
    for kind in ("argmax", "answer"):
        results = [row for row in rows if row["target"] == kind]
        assert len(results) == L * N * 2 * PROMPTS[suite]
        assert all(row["argmax" if kind == "argmax" else "answer"] >= 0 for row in results)
    assert any(row["u_star"] < -0.1 for row in rows)


def test_the_summary_can_be_computed_from_the_parquet_files(audited):
    result, rows = summary_of(audited), by_key(table(audited))
    # Unsafe rates, over argmax rows that are active.
    for entry in result["prevalence"]:
        own = (
            (rows["suite"] == entry["suite"])
            & (rows["bias_kind"] == entry["bias_kind"])
            & (rows["target"] == "argmax")
        )
        active = own & (rows["status"] == Status.ACTIVE)
        assert (entry["rows"], entry["active_rows"]) == (own.sum(), active.sum())
        for p in (2, 4, 8, 16):
            for name, of in (("unsafe", own), ("unsafe_active", active)):
                rate = entry[name][str(p)]
                assert rate["estimate"] == pytest.approx(np.mean(rows[f"s_{p}"][of] >= 1))
                assert rate["low"] <= rate["estimate"] <= rate["high"]
    # The ranking: heads by median S_2 of induction at b_auto.
    induction = (rows["suite"] == "induction") & (rows["bias_kind"] == "auto")
    active = induction & (rows["target"] == "argmax") & (rows["status"] == Status.ACTIVE)
    medians = {
        (layer, head): np.median(rows["s_2"][active & (rows["layer"] == layer) & mine])
        for layer in range(L)
        for head, mine in enumerate(rows["head"] == n for n in range(N))
        if (active & (rows["layer"] == layer) & mine).any()
    }
    heads = sorted(table(audited, "heads").to_pylist(), key=lambda head: head["rank"])
    ranked = [(h["layer"], h["head"]) for h in heads if h["active_rows"]]
    assert ranked == sorted(medians, key=lambda key: -medians[key])
    # Accuracies and discordant pairs, from the tokens the model gave.
    answers = table(audited, "answers").to_pylist()
    right = {
        (a["stage"], a["cell"], a["prompt"]): a["predicted"] == a["target"]
        for a in answers
        if a["stage"] != "control"
    }
    for stage in ("sweep", "ablation"):
        for entry in result[stage]:
            mine = {p: ok for (s, c, p), ok in right.items() if (s, c) == (stage, entry["cell"])}
            lost = [p for p, ok in mine.items() if not ok and right[stage, "softmax", p]]
            assert entry["accuracy"]["n"] == len(mine)
            assert entry["accuracy"]["estimate"] == pytest.approx(np.mean(list(mine.values())))
            assert entry["lost"] == len(lost)


def test_what_is_known_of_the_tiny_model_is_found(audited):
    result = summary_of(audited)
    accuracy = result["controls"]["accuracy"]
    assert (accuracy["niah_64"]["estimate"], accuracy["control"]["estimate"]) == (1.0, 0.0)
    sweep = {entry["recipe"]: entry for entry in result["sweep"]}
    assert (sweep["relu_p4_b0"]["lost"], sweep["relu_p4_b0"]["verdict"]) == (0, "undecided")
    by_head = {(h["layer"], h["head"]): h for h in table(audited, "heads").to_pylist()}
    needle = [
        row
        for row in table(audited).to_pylist()
        if (row["suite"], row["layer"], row["head"]) == ("niah_64", 1, 2)
    ]
    # The head that was written by hand reads the needle and nothing else.
    assert all(row["on_answer"] > 0.9 and row["argmax"] == row["answer"] for row in needle)
    assert len(by_head) == L * N


def test_recipes_of_other_degrees_and_biases_get_their_own_safe_share(run_audit, tmp_path):
    """relu:p=3,b=1 is measured at b = 1 and p = 3, and the sigmoid by its own weights."""
    recipes = ("relu:p=3,b=1", "relu:p=2.5,b=auto", "sigmoid:b=1", "relu_p4_b0")
    outcome = run_audit(tmp_path / "run", f"--config.recipes={recipes}")
    assert outcome.code == 0, outcome.err
    result, rows = summary_of(tmp_path / "run"), by_key(table(tmp_path / "run"))
    assert result["degrees"] == [2, 2.5, 3, 4, 8, 16]
    assert set(rows["bias_kind"]) == {"zero", "auto", "1"}
    needle = (rows["suite"] == "niah_64") & (rows["target"] == "argmax")
    shares = {v["recipe"]: v["safe"] for v in result["verdicts"]}
    for recipe, kind, p in (("relu_p3_b1", "1", "3"), ("relu_p2.5_bauto", "auto", "2.5")):
        own = needle & (rows["bias_kind"] == kind)
        assert own.any()
        assert shares[recipe]["estimate"] == pytest.approx(np.mean(rows[f"s_{p}"][own] < 1))
    assert set(rows["bias"][rows["bias_kind"] == "1"]) == {1.0}
    own = table(tmp_path / "run", "recipe_rows").to_pylist()
    safe = [row["s_own"] < 1 for row in own if row["suite"] == "niah_64"]
    assert shares["sigmoid_b1"]["estimate"] == pytest.approx(np.mean(safe))
    # S_3 is between S_2 and S_4 where each share r_j / r_* is below 1
    needle &= rows["status"] == Status.ACTIVE
    assert (rows["s_3"][needle] <= rows["s_2"][needle]).all()
    assert (rows["s_4"][needle] <= rows["s_3"][needle]).all()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "p = 2.5, %" in page and "b = 1" in page


def test_the_head_sets_of_the_ablation_are_read_back_and_give_its_answers(
    audited, expected_answers
):
    """Each set, put back into the model, answers as it did; the random ones have the seeds 0, 1."""
    masks = head_sets.read(audited / "head_sets.parquet", (L, N))
    sizes = {name: int(mask.sum()) for name, mask in masks.items()}
    assert sizes == {f"{g}-{k}{s}": k for g, s in SETS for k in (1, 3)}
    permuted = np.random.RandomState(0).permutation(L * N)
    assert set(np.flatnonzero(masks["random-3-0"])) == set(permuted[:3])
    heads = table(audited, "heads").to_pylist()
    ranked = [h["layer"] * N + h["head"] for h in sorted(heads, key=lambda h: h["rank"])]
    assert set(np.flatnonzero(masks["top-3"])) == set(ranked[:3])
    assert set(np.flatnonzero(masks["bottom-3"])) == set(ranked[-3:])
    expected_answers.assert_within(audited)
    answers = [row for row in table(audited, "answers").to_pylist() if row["stage"] == "ablation"]
    assert len({round(row["loss"], 4) for row in answers}) > 4
    with pytest.raises(BadInputError, match="read the file of the same model"):
        head_sets.read(audited / "head_sets.parquet", (1, N))


def test_own_prompts_are_one_more_suite(asked):
    folder, _, _ = asked
    result = summary_of(folder)
    cells = {entry["cell"]: entry for entry in result["prompts"]}
    assert [*cells] == [entry["cell"] for entry in result["sweep"]]
    answers = [row for row in table(folder, "answers").to_pylist() if row["stage"] == "prompts"]
    assert len(answers) == 9 * len(cells)
    for name, entry in cells.items():
        right = [a["predicted"] == a["target"] for a in answers if a["cell"] == name]
        assert entry["accuracy"] | {"low": 0, "high": 0} == pytest.approx(
            {"estimate": np.mean(right), "n": 9, "low": 0, "high": 0}
        )
    assert cells["softmax"]["accuracy"]["estimate"] == 1.0
    # The tiny model has no induction, which decides nothing of these prompts.
    (unmet,) = result["controls"]["unmet"]
    assert "does not fall to half" in unmet
    assert {entry["verdict"] for entry in result["sweep"]} == {"undecided"}
    assert cells[parse_recipe(HOPELESS).name]["verdict"] == "no-go"
    assert {e["suite"] for e in result["prevalence"]} >= {*PROMPTS, "prompts"}
    # The answer's key is the noun's position.
    rows = [r for r in table(folder).to_pylist() if r["suite"] == "prompts"]
    assert {r["answer"] for r in rows} == {4}
    manifest = json.loads((folder / "suites.json").read_text())["prompts"]
    assert manifest["source"] == "mine.jsonl"


@pytest.fixture(scope="module")
def assert_same_audit(audited, expected_rows, expected_answers, bias_limits):
    """Asserts that an audit has the lines of `audited`, and in each line what it should have."""

    def check(folder):
        low, high = bias_limits
        assert low <= read_json(folder / "calibration.json")["bias"] <= high
        ours, theirs = by_key(table(folder)), by_key(table(audited))
        for name in (*KEY, "head_type"):
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        for row in table(folder).to_pylist():
            audit_oracle.assert_row(row, expected_rows[row["suite"]][place_of(row)])
        mine, yours = (by_key(table(f, "answers"), ANSWER_KEY) for f in (folder, audited))
        for name in set(mine) - {"loss", "bias"}:
            np.testing.assert_array_equal(mine[name], yours[name], err_msg=name)
        expected_answers.assert_within(folder)

    return check


def test_the_batch_size_does_not_change_the_audit(assert_same_audit, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.batch_size=3")
    assert outcome.code == 0, outcome.err
    assert_same_audit(tmp_path / "run")


def test_four_devices_give_the_audit_of_one(assert_same_audit, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.mesh=(2, 1, 2)", "--config.batch_size=2")
    assert outcome.code == 0, outcome.err
    assert_same_audit(tmp_path / "run")


def test_the_kernels_give_the_rows_of_dense_attention(assert_same_audit, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.attention=kernels")
    assert outcome.code == 0, outcome.err
    assert_same_audit(tmp_path / "run")


def test_rows_are_reduced_inside_the_layer(audited_model):
    cfg, B, T, Q = audited_model.model.cfg, 2, 67, 1
    jaxpr = jax.make_jaxpr(functools.partial(measure.diagnose, cfg=cfg))(
        audited_model.model.params,
        jnp.zeros((B, T), jnp.int32),
        jnp.full((B, Q), T - 1),
        jnp.zeros((B, Q), jnp.int32),
        jnp.zeros(2),
    )
    scans = list(_scans(jaxpr.jaxpr))
    assert any(scan.params["length"] == L for scan in scans)
    # No row leaves its layer, nor any score: T is the length of no output but the residual stream.
    shapes = [v.aval.shape for scan in scans for v in scan.outvars]
    assert {shape for shape in shapes if T in shape} == {(B, T, cfg.hidden_size)}
    assert all(T not in v.aval.shape for v in jaxpr.jaxpr.outvars)


def _scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _scans(inner)
