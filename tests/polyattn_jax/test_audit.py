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

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.sites import keep
from polyattn_jax import audit, head_sets, measure, schema, stages
from polyattn_jax.config import AuditConfig
from polyattn_jax.diagnostic import Status
from polyattn_jax.row_maps import parse_recipe
from polyattn_jax.schema import PROVENANCE

L, N = 3, 4
PROMPTS = {"niah_64": 7, "induction": 4, "mqar": 3}
TABLES = ("rows", "answers", "heads")
SETS = [("top", ""), ("bottom", ""), ("random", "-0")]
KEY = ["suite", "prompt", "layer", "head", "query", "target", "bias_kind"]
MEASURED = ["margin", "u_star", "sink", "on_answer"]


def table(folder, name="rows"):
    return pq.read_table(folder / f"{name}.parquet")


def by_key(rows, key=KEY):
    """Rows in an order that does not depend on how they were batched, as columns."""
    ordered = rows.sort_by([(name, "ascending") for name in key])
    return {name: ordered[name].to_numpy(zero_copy_only=False) for name in ordered.column_names}


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def subject(tiny, haystack):
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
    return audit.load(config)


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


def test_every_result_file_says_what_made_it(audited):
    recorded = json.loads((audited / "provenance.json").read_text())
    said = [json.loads(table(audited, n).schema.metadata[PROVENANCE]) for n in TABLES]
    said.append(summary_of(audited)["provenance"])
    for provenance in said:
        assert len(provenance.pop("config_hash")) == 64
        assert provenance == recorded
    assert {"git", "packages", "device", "start", "seeds", "data"} <= set(recorded)


def test_files_of_two_models_can_be_merged(audited, tiny):
    for name in TABLES:
        assert set(table(audited, name)["model"].to_pylist()) == {tiny.name}


def float64_statistics(scores_S, bias, target):
    """S_p and its companions for one row of unmasked scores, in the words of section 3."""
    u = scores_S.astype(np.float64) + bias
    r = np.maximum(u, 0.0)
    others = np.delete(np.arange(len(u)), target)
    status = Status.ACTIVE if r[target] > 0 else Status.DEAD
    if status == Status.DEAD:
        return status, [np.inf] * 4, u[target] - u[others].max(), 0, np.inf
    s = [((r[others] / r[target]) ** p).sum() for p in (2, 4, 8, 16)]
    margin, active = u[target] - u[others].max(), int((r[others] > 0).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        p_star = np.log(active) / -np.log1p(-margin / u[target]) if active > 1 else 0.0
    return status, s, margin, active, p_star if margin > 0 or active < 2 else np.inf


@pytest.mark.parametrize("suite", ["niah_64", "mqar"])
def test_rows_equal_a_float64_oracle_on_recorded_scores(audited, subject, suite):
    prompts = {p.id: p for p in stages.build_suites(subject)[suite].prompts}
    tokens_BT = jnp.asarray([p.tokens for p in prompts.values()])
    record = {"attn.scores": keep, "attn.pattern": keep}
    out = lm_jax.forward(subject.model.params, tokens_BT, subject.model.cfg, record=record)
    place = {name: b for b, name in enumerate(prompts)}
    rows = [row for row in table(audited).to_pylist() if row["suite"] == suite]
    targets, below = {"argmax": 0, "answer": 0}, 0
    for row in rows:
        at = row["layer"], place[row["prompt"]], row["head"], row["query"]
        scores_S = np.asarray(out.records["attn.scores"][at])[: row["query"] + 1]
        answer = prompts[row["prompt"]].answer_position
        target = int(scores_S.argmax()) if row["target"] == "argmax" else answer
        status, s, margin, active, p_star = float64_statistics(scores_S, row["bias"], target)
        assert (row["status"], row["active"]) == (status, active)
        assert (row["argmax"], row["answer"]) == (scores_S.argmax(), answer)
        # float32 holds no smaller nor larger ones.
        computed = np.clip([row[f"s_{p}"] for p in (2, 4, 8, 16)], 1e-37, 1e37)
        np.testing.assert_allclose(computed, np.clip(s, 1e-37, 1e37), rtol=2e-4)
        np.testing.assert_allclose(row["margin"], margin, rtol=1e-4, atol=1e-5)
        u_star = np.float64(scores_S[target]) + row["bias"]
        np.testing.assert_allclose(row["u_star"], u_star, rtol=1e-4, atol=1e-5)
        assert row["r_star"] == (row["u_star"] if status == Status.ACTIVE else 0.0)
        below += row["u_star"] < -0.1
        if status == Status.ACTIVE and row["target"] == "argmax":
            np.testing.assert_allclose(row["p_star"], p_star, rtol=1e-3)
        pattern_S = np.asarray(out.records["attn.pattern"][at])
        np.testing.assert_allclose(
            [row["sink"], row["on_answer"]], pattern_S[[0, answer]], rtol=1e-4, atol=1e-6
        )
        targets[row["target"]] += 1
    assert targets == dict.fromkeys(targets, L * N * 2 * PROMPTS[suite])
    assert below > 0


def test_the_summary_can_be_computed_from_the_parquet_files(audited):
    found, rows = summary_of(audited), by_key(table(audited))
    # Unsafe rates, over argmax rows that are active.
    for entry in found["prevalence"]:
        own = (
            (rows["suite"] == entry["suite"])
            & (rows["bias_kind"] == entry["bias_kind"])
            & (rows["target"] == "argmax")
        )
        active = own & (rows["status"] == Status.ACTIVE)
        assert (entry["rows"], entry["active_rows"]) == (own.sum(), active.sum())
        for p in (2, 4, 8, 16):
            rate = entry["unsafe"][str(p)]
            assert rate["estimate"] == pytest.approx(np.mean(rows[f"s_{p}"][active] >= 1))
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
        for entry in found[stage]:
            mine = {p: ok for (s, c, p), ok in right.items() if (s, c) == (stage, entry["cell"])}
            lost = [p for p, ok in mine.items() if not ok and right[stage, "softmax", p]]
            assert entry["accuracy"]["n"] == len(mine)
            assert entry["accuracy"]["estimate"] == pytest.approx(np.mean(list(mine.values())))
            assert entry["lost"] == len(lost)


def test_what_is_known_of_the_tiny_model_is_found(audited):
    found = summary_of(audited)
    accuracy = found["controls"]["accuracy"]
    assert (accuracy["niah_64"]["estimate"], accuracy["control"]["estimate"]) == (1.0, 0.0)
    sweep = {entry["recipe"]: entry for entry in found["sweep"]}
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
    """relu:p=3,b=1 is measured at b = 1 and p = 3, and nothing is said for a map without S_p."""
    recipes = ("relu:p=3,b=1", "relu:p=2.5,b=auto", "sigmoid:b=1", "relu_p4_b0")
    outcome = run_audit(tmp_path / "run", f"--config.recipes={recipes}")
    assert outcome.code == 0, outcome.err
    found, rows = summary_of(tmp_path / "run"), by_key(table(tmp_path / "run"))
    assert found["degrees"] == [2, 2.5, 3, 4, 8, 16]
    assert set(rows["bias_kind"]) == {"zero", "auto", "1"}
    needle = (rows["suite"] == "niah_64") & (rows["target"] == "argmax")
    needle &= rows["status"] == Status.ACTIVE
    shares = {v["recipe"]: v["safe"] for v in found["verdicts"]}
    for recipe, kind, p in (("relu_p3_b1", "1", "3"), ("relu_p2.5_bauto", "auto", "2.5")):
        own = needle & (rows["bias_kind"] == kind)
        assert own.any()
        assert shares[recipe]["estimate"] == pytest.approx(np.mean(rows[f"s_{p}"][own] < 1))
    assert set(rows["bias"][rows["bias_kind"] == "1"]) == {1.0}
    assert shares["sigmoid_b1"] is None
    # S_3 lies between S_2 and S_4 where each share r_j / r_* is below 1
    assert (rows["s_3"][needle] <= rows["s_2"][needle]).all()
    assert (rows["s_4"][needle] <= rows["s_3"][needle]).all()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "p = 2.5, %" in page and "b = 1" in page


def test_the_head_sets_of_the_ablation_are_read_back_and_give_its_answers(audited, subject):
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
    answers = [row for row in table(audited, "answers").to_pylist() if row["stage"] == "ablation"]
    prompts = {p.id: p for p in stages.build_suites(subject)["niah_64"].prompts}
    recipe = parse_recipe(subject.config.ablation_recipe)
    for name, heads_LN in masks.items():
        rows = [row for row in answers if row["cell"] == name]
        tokens_BT = jnp.asarray([prompts[row["prompt"]].tokens for row in rows])
        again = measure.answer(
            subject.model.params,
            tokens_BT,
            jnp.full(len(rows), tokens_BT.shape[1]),
            jnp.asarray([row["target"] for row in rows]),
            jnp.int32(0),
            jnp.float32(rows[0]["bias"]),
            jnp.asarray(heads_LN),
            cfg=subject.model.cfg,
            maps=(recipe.map,),
        )
        np.testing.assert_array_equal(again["predicted"], [row["predicted"] for row in rows])
        np.testing.assert_allclose(again["loss"], [row["loss"] for row in rows], atol=1e-5)
    assert len({round(row["loss"], 4) for row in answers}) > len(rows)
    with pytest.raises(BadInputError, match="read the file of the same model"):
        head_sets.read(audited / "head_sets.parquet", (1, N))


def test_a_recipe_with_a_bias_of_its_own_is_measured_at_it(run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.recipes=('relu:p=4,b=0.25',)")
    assert outcome.code == 0, outcome.err
    verdicts = {entry["recipe"]: entry for entry in summary_of(tmp_path / "run")["verdicts"]}
    verdict = verdicts["relu_p4_b0.25"]
    rows = by_key(table(tmp_path / "run"))
    own = (
        (rows["bias_kind"] == "0.25") & (rows["target"] == "argmax") & (rows["suite"] == "niah_64")
    )
    assert set(rows["bias"][own]) == {0.25}
    active = own & (rows["status"] == Status.ACTIVE)
    assert verdict["safe"]["estimate"] == pytest.approx(np.mean(rows["s_4"][active] < 1))
    assert "b = 0.25" in (tmp_path / "run" / "report.html").read_text()


def test_own_prompts_are_one_more_suite(run_audit, prompts_file, tmp_path):
    outcome = run_audit(tmp_path / "run", f"--config.prompts={prompts_file}")
    assert outcome.code == 0, outcome.err
    found = summary_of(tmp_path / "run")
    cells = {entry["cell"]: entry for entry in found["prompts"]}
    assert [*cells] == [entry["cell"] for entry in found["sweep"]]
    answers = [
        row for row in table(tmp_path / "run", "answers").to_pylist() if row["stage"] == "prompts"
    ]
    assert len(answers) == 9 * len(cells)
    for name, entry in cells.items():
        right = [a["predicted"] == a["target"] for a in answers if a["cell"] == name]
        assert entry["accuracy"] | {"low": 0, "high": 0} == pytest.approx(
            {"estimate": np.mean(right), "n": 9, "low": 0, "high": 0}
        )
    assert cells["softmax"]["accuracy"]["estimate"] == 1.0
    assert {e["suite"] for e in found["prevalence"]} == {*PROMPTS, "prompts"}
    # The answer's key is where the noun stands.
    rows = [r for r in table(tmp_path / "run").to_pylist() if r["suite"] == "prompts"]
    assert {r["answer"] for r in rows} == {4}
    assert "Your prompts: do they keep their answers?" in (
        tmp_path / "run" / "report.html"
    ).read_text("utf-8")
    manifest = json.loads((tmp_path / "run" / "suites.json").read_text())["prompts"]
    assert manifest["source"] == "mine.jsonl"


def test_the_same_command_again_says_that_it_is_finished(audited, run_audit):
    before = {path: path.read_bytes() for path in audited.glob("*.parquet")}
    outcome = run_audit(audited)
    assert outcome.code == 0
    assert outcome.out.startswith("finished ")
    assert outcome.err == []
    assert before == {path: path.read_bytes() for path in audited.glob("*.parquet")}


def same_rows(folder, other):
    """Asserts that two audits agree: counts exactly, statistics up to rounding."""
    ours, theirs = by_key(table(folder)), by_key(table(other))
    for name in (*KEY, "status", "argmax", "answer", "active", "distance", "head_type"):
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name in MEASURED:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)
    # p* goes to infinity as the margin goes to 0, rho to minus infinity as u_* does off the argmax.
    np.testing.assert_allclose(1 / (1 + ours["p_star"]), 1 / (1 + theirs["p_star"]), atol=1e-5)
    rho, other_rho = (np.maximum(c["relative_margin"], -1) for c in (ours, theirs))
    np.testing.assert_allclose(rho, other_rho, atol=1e-5)
    for s_p in ("s_2", "s_4", "s_8", "s_16", "s_softmax"):
        # The mass on the target, and on which side of 1 the row is.
        np.testing.assert_allclose(1 / (1 + ours[s_p]), 1 / (1 + theirs[s_p]), atol=1e-5)
        np.testing.assert_array_equal(ours[s_p] >= 1, theirs[s_p] >= 1)
    mine, yours = (table(f, "answers").to_pylist() for f in (folder, other))
    key = ("stage", "cell", "suite", "prompt")
    mine, yours = (sorted(a, key=lambda row: [row[k] for k in key]) for a in (mine, yours))
    for first, second in zip(mine, yours, strict=True):
        assert first.pop("loss") == pytest.approx(second.pop("loss"), abs=1e-5)
        assert first.pop("bias") == pytest.approx(second.pop("bias"), abs=1e-5)
        assert first == second


def test_the_batch_size_does_not_change_the_audit(audited, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.batch_size=3")
    assert outcome.code == 0, outcome.err
    same_rows(audited, tmp_path / "run")


def test_four_devices_give_the_audit_of_one(audited, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.mesh=(2, 1, 2)", "--config.batch_size=2")
    assert outcome.code == 0, outcome.err
    same_rows(audited, tmp_path / "run")


def test_the_kernels_give_the_rows_of_dense_attention(audited, run_audit, tmp_path):
    outcome = run_audit(tmp_path / "run", "--config.attention=kernels")
    assert outcome.code == 0, outcome.err
    same_rows(audited, tmp_path / "run")


def test_rows_are_reduced_inside_the_layer(subject):
    cfg, B, T, Q = subject.model.cfg, 2, 67, 1
    jaxpr = jax.make_jaxpr(functools.partial(measure.diagnose, cfg=cfg))(
        subject.model.params,
        jnp.zeros((B, T), jnp.int32),
        jnp.full((B, Q), T - 1),
        jnp.zeros((B, Q), jnp.int32),
        jnp.zeros(2),
    )
    scans = list(_scans(jaxpr.jaxpr))
    assert any(scan.params["length"] == L for scan in scans)
    # No row leaves its layer, nor any score: T is the length of no output but the residual stream.
    made = [v.aval.shape for scan in scans for v in scan.outvars]
    assert {shape for shape in made if T in shape} == {(B, T, cfg.hidden_size)}
    assert all(T not in v.aval.shape for v in jaxpr.jaxpr.outvars)


def _scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _scans(inner)
