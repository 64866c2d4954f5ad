"""The search for the heads that may have a recipe, and the file that it leaves."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

import lm_jax
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.results import load_result
import polyattn_jax
from polyattn_jax.audit import opening
from polyattn_jax.audit.results import CheckResult, HybridResult
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.check.hybrid import groups_of
from tests import tiny as tiny_model
from tests.polyattn_jax.conftest import PROSE
from tests.tiny import edit_json

# Run by `make test-all`.
pytestmark = pytest.mark.long

L, N = 3, 4
PROMPTS = 73


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    """Twenty texts, of which the search reads ten."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("texts") / "mine.jsonl"
    rows = [{"id": f"{i}", "text": " ".join(rng.choice(PROSE, 30))} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def search_flags(texts_file, folder):
    return [
        *("--recipe=relu_p4_b0", f"--n={PROMPTS}", f"--text={texts_file}", "--max_loss=1000"),
        *("--keep=0,50", "--draws=1", "--batch_size=10", f"--hybrid={folder / 'heads.json'}"),
        f"--workdir={folder / 'run'}",
    ]


@pytest.fixture(scope="module")
def searched(run_check, texts_file, tmp_path_factory):
    """Output, result, stored losses and saved file of a search on the tiny model."""
    folder = tmp_path_factory.mktemp("searches")
    outcome = run_check(*search_flags(texts_file, folder))
    assert outcome.code == 0, outcome.err
    result = load_result(folder / "run" / "summary.json", HybridResult)
    losses = pq.read_table(folder / "run" / "text_losses").to_pylist()
    return outcome.out, result, losses, folder / "heads.json"


def test_heads_are_ranked_on_texts_that_measure_nothing(searched):
    _, result, losses, _ = searched
    by_stage = {}
    for row in losses:
        by_stage.setdefault(row["stage"], set()).add(row["prompt"])
    even, odd = ([f"{i}" for i in range(start, 20, 2)] for start in (0, 1))
    assert by_stage == {"single heads": set(even), "frontier": set(odd)}
    loss = {(row["cell"], row["prompt"]): row["loss"] for row in losses}
    for head in result.singles:
        own = [loss[f"{head.layer * N + head.head}", t] - loss["softmax", t] for t in even]
        assert head.change.estimate == pytest.approx(np.mean(own), abs=1e-12)
    ranked = sorted(result.singles, key=lambda head: head.rank)
    assert [h.rank for h in ranked] == list(range(L * N))
    changes = [h.change.estimate for h in ranked]
    assert changes == sorted(changes, reverse=True) and len(set(changes)) > L


def test_the_frontier_holds_ranked_and_random_sets_and_the_rule(searched):
    out, result, _, path = searched
    assert [(e.kept, e.seed) for e in result.frontier] == [(0, None), (6, None), (6, 0)]
    for entry in result.frontier:
        assert entry.text.heads == entry.needle.heads == L * N - entry.kept
        assert entry.accepted == (
            entry.text.change.high < 1000 and entry.needle.verdict == "preserve"
        )
    # The tiny model retrieves with the recipe in every head.
    assert result.frontier[0].accepted and len(result.best.replaced) == L * N
    assert "12 of 12 heads can have relu:p=4,b=0" in " ".join(out.split())
    assert f"Saved to {path}\n" in out
    assert max(len(line) for line in out.splitlines() if str(path) not in line) <= 80


def test_a_search_that_was_killed_after_it_saved_the_heads_goes_on(searched, run_check, texts_file):
    *_, path = searched
    folder, held = path.parent, path.read_bytes()
    marker = folder / "run" / "finished.json"
    marker.unlink()
    path.write_text("{}")
    (line,) = run_check(*search_flags(texts_file, folder)).refusals
    assert "heads.json exists" in line and path.read_text() == "{}"
    path.write_bytes(held)
    assert run_check(*search_flags(texts_file, folder)).code == 0
    assert marker.exists() and path.read_bytes() == held


def test_a_set_is_accepted_by_students_interval_over_texts(searched):
    _, result, losses, _ = searched
    for entry in result.frontier:
        seed = "" if entry.seed is None else "random-"
        name = f"but-{seed}{entry.kept}" + (f"-{entry.seed}" if seed else "")
        change = [
            next(r["loss"] for r in losses if (r["cell"], r["prompt"]) == (name, f"{i}"))
            - next(
                r["loss"]
                for r in losses
                if (r["stage"], r["cell"], r["prompt"]) == ("frontier", "softmax", f"{i}")
            )
            for i in range(1, 20, 2)
        ]
        want = stats.ttest_1samp(change, 0.0).confidence_interval()
        # All texts have as many tokens.
        assert entry.text.change.low == pytest.approx(want.low, rel=1e-9)
        assert entry.text.change.high == pytest.approx(want.high, rel=1e-9)


def test_saved_heads_are_judged_by_the_rule_of_a_recipe(searched, run_check, texts_file, tmp_path):
    """The same answers and losses as in the search, where the set was one of many."""
    _, found, _, file = searched
    kept = L * N - len(found.best.replaced)
    (best,) = (each for each in found.frontier if (each.seed, each.kept) == (None, kept))
    flags = [f"--recipe={file}", f"--n={PROMPTS}", f"--text={texts_file}"]
    outcome = run_check(*flags, f"--workdir={tmp_path / 'run'}")
    result = load_result(tmp_path / "run" / "summary.json", CheckResult)
    (needle,) = result.tasks
    assert (needle.recipe, needle.lost) == (best.needle.accuracy, best.needle.lost)
    assert (result.replaced, result.of_heads) == (len(found.best.replaced), L * N)
    assert outcome.code == {"preserve": 0, "no-go": 10, "undecided": 11}[best.needle.verdict]
    assert f"{result.replaced} of {L * N} heads of tiny" in " ".join(outcome.out.split())
    # Its loss is of all texts, that of the search of every other one.
    answers = pq.read_table(tmp_path / "run" / "answers").to_pylist()
    assert {row["heads"] for row in answers if row["cell"] == "relu_p4_b0"} == {result.replaced}


def test_saved_heads_of_another_model_or_in_another_question_are_refused(
    searched, run_check, tiny, tmp_path
):
    _, _, _, file = searched
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    outcome = run_check(f"--recipe={file}", "--n=2", model=other)
    assert outcome.code == 3 and "the heads were found on" in outcome.err[0]
    outcome = run_check(f"--recipe={file}", "--hybrid=new.json", "--text=essays")
    assert outcome.code == 2 and "which --hybrid and --diagnose do not take" in outcome.err[0]
    outcome = run_check("--recipe=no/such.json")
    assert outcome.code == 3 and "no/such.json" in outcome.err[0]


def test_a_task_that_tells_nothing_of_what_is_read_accepts_no_set(
    searched, run_check, texts_file, tmp_path
):
    """Every prompt has the same answer: softmax and the recipe give it, and no set is accepted."""
    words = [f"{a} {b}" for a in PROSE[:9] for b in PROSE[9:18]]
    rows = [
        {"id": each, "prompt": f"The secret word is apple. {each}. The secret word is"}
        | {"answer": " apple"}
        for each in words
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "same").mkdir()
    flags = search_flags(texts_file, tmp_path / "same")
    outcome = run_check(*flags, f"--task=prompts:{path}")
    assert outcome.code == 0, outcome.err
    result = load_result(tmp_path / "same" / "run" / "summary.json", HybridResult)
    assert "preserve" in {entry.needle.verdict for entry in result.frontier}
    assert not any(entry.accepted for entry in result.frontier) and result.best is None


@pytest.mark.parametrize(("by", "together"), [("kv_head", 2), ("layer", 4)])
def test_heads_that_share_a_key_head_or_a_layer_go_together(
    run_check, texts_file, tmp_path, by, together
):
    outcome = run_check(*search_flags(texts_file, tmp_path), f"--by={by}")
    assert outcome.code == 0, outcome.err
    result = load_result(tmp_path / "run" / "summary.json", HybridResult)
    by_head = {(each.layer, each.head): each for each in result.singles}
    assert len(by_head) == L * N
    for (layer, head), each in by_head.items():
        first = by_head[layer, head - head % together]
        assert (each.rank, each.change) == (first.rank, first.change)
    assert {each.rank for each in result.singles} == set(range(L * N // together))
    for entry in result.frontier:
        assert entry.kept % together == 0
        # r^p has no finite feature map: every cache stays.
        assert entry.freed == 0 and entry.state == result.softmax_state
    assert result.kv_heads == L * N // 2
    assert "No cache goes" in " ".join(outcome.out.split())


def test_heads_of_a_group_are_those_of_a_key_head_or_a_layer():
    cfg = tiny_model.decoder(num_layers=2, num_heads=4, num_kv_heads=2)
    assert groups_of(cfg, "kv_head").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(cfg, "layer").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_set_must_keep_every_task(searched, run_check, texts_file, tmp_path):
    """The tiny model finds needles and does no induction, so that no set is shown to keep it."""
    (tmp_path / "both").mkdir()
    flags = search_flags(texts_file, tmp_path / "both")
    outcome = run_check(*flags, "--task=niah", "--task=induction")
    assert outcome.code == 0, outcome.err
    result = load_result(tmp_path / "both" / "run" / "summary.json", HybridResult)
    _, alone, _, _ = searched
    assert result.tasks == ("needle", "induction") and alone.tasks == ("needle",)
    assert any(entry.accepted for entry in alone.frontier)
    for entry, same in zip(result.frontier, alone.frontier, strict=True):
        assert entry.needle == same.needle and entry.text == same.text
        assert entry.others["induction"].verdict == "undecided" and not entry.accepted
    assert result.best is None and not (tmp_path / "both" / "heads.json").exists()
    assert "preserve needle, induction" in " ".join(outcome.out.split())
    refused = run_check(*search_flags(texts_file, tmp_path), "--task=choices:arc_easy")
    assert refused.code == 3 and "has no prompts with answers" in refused.err[0]


def test_a_file_is_neither_lost_nor_replaced_nor_asked_for_too_late(
    run_check, texts_file, tmp_path, monkeypatch
):
    old = tmp_path / "heads.json"
    old.write_text("{}")
    monkeypatch.setattr(opening, "load", lambda config: pytest.fail("the model was loaded"))
    for target, words in (
        (old, "heads.json exists; name a file that does not, or remove it"),
        (tmp_path / "none" / "heads.json", "there is no folder"),
    ):
        (line,) = run_check(f"--hybrid={target}", f"--text={texts_file}").refusals
        assert words in line
    assert old.read_text() == "{}"


def test_the_saved_heads_run_as_they_were_tried(searched, tiny, tmp_path):
    *_, path = searched
    model = lm_jax.load_pretrained(tiny)
    held = json.loads(path.read_text())
    kept = [[1, 2], [2, 0]]
    held["replaced"] = [place for place in held["replaced"] if place not in kept]
    (tmp_path / "heads.json").write_text(json.dumps(held))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 200, (2, 20)))
    mask = np.ones((L, N), bool)
    mask[tuple(np.transpose(kept))] = False

    def logits(attend):
        return lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend).logits

    row_map = parse_recipe(held["recipe"]).map
    wanted = polyattn_jax.substitute(
        [row_map], 0, held["bias"], jnp.asarray(mask), jnp.ones((2, 20), bool)
    )
    got = logits(polyattn_jax.load_recipe(tmp_path / "heads.json", model))
    np.testing.assert_array_equal(got, logits(wanted))
    assert not np.array_equal(got, logits(polyattn_jax.load_recipe(path, model)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", 2, "version = 2"),
        ("replaced", [[0, 4]], "beyond 3 layers of 4 heads; remove it"),
        ("replaced", [[1, 0], [0, 0]], "once, in ascending order"),
        ("recipe", "rleu:p=2", "did you mean 'relu'"),
        ("biass", 1.0, "biass is not a field of HybridRecipe"),
    ],
)
def test_a_damaged_file_is_refused(searched, tiny, tmp_path, field, value, words):
    held = json.loads(searched[-1].read_text())
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(held | {field: value}))
    with pytest.raises(CorruptError, match=words):
        polyattn_jax.load_recipe(path, lm_jax.load_pretrained(tiny))


def test_heads_run_in_the_model_that_they_were_found_on_alone(searched, tiny, tmp_path, capsys):
    """Equal weights with another base of the rotation are another model."""
    path = searched[-1]
    other = shutil.copytree(tiny, tmp_path / "other")
    rope = {"rope_type": "default", "rope_theta": 777.0}
    edit_json(other / "config.json", rope_parameters=rope)
    with pytest.raises(BadInputError, match=r"heads were found on .* with configuration .*, not"):
        polyattn_jax.load_recipe(path, lm_jax.load_pretrained(other))
    # A file of an earlier version has the digest of the weights.
    model = lm_jax.load_pretrained(tiny)
    old = tmp_path / "old.json"
    held = json.loads(path.read_text())
    old.write_text(json.dumps(held | {"model_sha256": model.sha256}))
    for _ in range(2):
        polyattn_jax.load_recipe(old, model)
    assert capsys.readouterr().err.count("identified a model by its weights alone") == 1
    old.write_text(json.dumps(held | {"model_sha256": "0" * 64}))
    with pytest.raises(BadInputError, match="with weights 000000000000, not"):
        polyattn_jax.load_recipe(old, model)


def test_heads_are_ranked_by_prompts_that_measure_nothing(run_check, texts_file, tmp_path):
    flags = search_flags(texts_file, tmp_path)
    outcome = run_check(*flags, "--rank=task", "--n=90")
    assert outcome.code == 0, outcome.err
    result = load_result(tmp_path / "run" / "summary.json", HybridResult)
    rows = pq.read_table(tmp_path / "run" / "answers").to_pylist()
    (ranking,) = {row["suite"] for row in rows if row["stage"].startswith("single heads")}
    by_suite = {}
    for row in rows:
        by_suite.setdefault(row["suite"], set()).add(row["prompt"])
    asked = by_suite[ranking.removesuffix("_ranking")]
    # Beside the prompts that are asked for.
    assert len(by_suite[ranking]) == 24 and len(asked) == 90 and not by_suite[ranking] & asked
    loss = {}
    for row in rows:
        if row["suite"] == ranking:
            loss.setdefault(row["cell"], []).append(row["loss"])
    for head in result.singles:
        own = np.mean(loss[f"{head.layer * N + head.head}"]) - np.mean(loss["softmax"])
        assert head.change is None and head.cost == pytest.approx(own, abs=1e-6)
    assert "prompts that were held back" in " ".join(outcome.out.split())


def test_a_set_is_accepted_within_the_bytes_that_it_may_keep(run_check, texts_file, tmp_path):
    def search(recipe, folder, most):
        flags = [f for f in search_flags(texts_file, folder) if not f.startswith("--recipe=")]
        own = [f"--recipe={recipe}", f"--max_state={most}", "--by=layer", "--length=64"]
        return run_check(*flags, *own)

    outcome = search("window:w=12,sinks=4", tmp_path, 20)
    assert outcome.code == 0, outcome.err
    result = load_result(tmp_path / "run" / "summary.json", HybridResult)
    # 2 numbers of float32, of 64 tokens, of each width and key head of each layer.
    of_layer = 2 * 4 * 64 * 16 * result.kv_heads // L
    assert result.softmax_state == L * of_layer
    # A quarter of the prompt is in the window.
    part = of_layer // 4
    assert {entry.kept: entry.state for entry in result.frontier} == {
        0: L * part,
        2 * N: 2 * of_layer + part,
    }
    assert result.best is None and not any(entry.accepted for entry in result.frontier)
    (tmp_path / "small").mkdir()
    outcome = search("elu1", tmp_path / "small", 60)
    result = load_result(tmp_path / "small" / "run" / "summary.json", HybridResult)
    # Two layers keep their cache, a replaced key head has 16 features of 17 numbers.
    small = 4 * 16 * 17 * result.kv_heads // L
    assert {entry.kept: entry.state for entry in result.frontier} == {
        0: L * small,
        2 * N: 2 * of_layer + small,
    }
    # Two query heads read each key head.
    assert {entry.kept: entry.freed for entry in result.frontier} == {0: L * 2, 2 * N: 2}
    assert not any(entry.accepted for entry in result.frontier if entry.kept)
    for entry in result.front:
        assert entry.state < result.softmax_state or entry.text.change.estimate < 0
        assert not any(
            other.state <= entry.state
            and other.text.change.estimate < entry.text.change.estimate
            and other.needle.accuracy.estimate >= entry.needle.accuracy.estimate
            for other in result.frontier
        )
    assert result.front and outcome.code == 0


def test_a_statistic_that_is_the_same_everywhere_ranks_nothing(run_check, texts_file, tmp_path):
    flags = [f for f in search_flags(texts_file, tmp_path) if not f.startswith("--recipe=")]
    outcome = run_check(*flags, "--recipe=elu1", "--rank=unsafe")
    assert (
        outcome.code == 3
        and "in every group of heads under elu1, which ranks none" in outcome.err[0]
    )
