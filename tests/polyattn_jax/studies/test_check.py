"""A check exits 0, 10 or 11 with its verdict, and prints the numbers it rests on."""

import hashlib
import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats

from polyattn_jax.studies.check import STUDY
from polyattn_jax.studies.check.settings import CheckConfig
from tests.polyattn_jax.conftest import run_study

PROMPTS = 7
HOPELESS = "relu:p=4,b=-1000"


def fields(text):
    """The lines of a table as a mapping of label to values."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return {line[:34].strip(): line[34:].split() for line in lines}


@pytest.mark.parametrize(
    ("recipe", "prompts", "code", "verdict"),
    [
        ("softmax", PROMPTS, 11, "UNDECIDED"),
        ("relu:p=4,b=auto", PROMPTS, 11, "UNDECIDED"),
        ("relu_p4_b0", 73, 0, "PRESERVE"),
        ("ramapuram:b=-1000", PROMPTS, 10, "NO-GO"),
        (HOPELESS, PROMPTS, 10, "NO-GO"),
    ],
)
def test_the_exit_code_is_the_verdict(run_check, recipe, prompts, code, verdict):
    outcome = run_check(f"--recipe={recipe}", f"--n={prompts}")
    assert outcome.code == code, outcome.err
    assert f"\nverdict   {verdict}\n" in outcome.out
    assert "\nreason    " in outcome.out and "\nnext      " in outcome.out
    printed = fields(outcome.out)
    assert printed["prompts that could be lost"] == [str(prompts)]
    assert printed["preserve takes, none being lost"] == ["73"]
    measured = recipe.startswith("relu")
    assert ("\nS was not measured" in outcome.out) != measured
    assert "see the ablation" not in outcome.out
    assert outcome.refusals == []


def test_a_model_that_fails_the_control_leaves_the_check_undecided(run_check, tiny, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    weights = load_file(model / "model.safetensors")
    # the output matrix no longer reads what the head copied
    weights["lm_head.weight"] = np.zeros_like(weights["lm_head.weight"])
    save_file(weights, model / "model.safetensors")
    outcome = run_check(f"--recipe={HOPELESS}", "--n=40", model=model)
    assert outcome.code == 11
    assert "softmax itself is right in 0 of 40 prompts" in " ".join(outcome.out.split())


def test_a_hopeless_recipe_is_printed_with_intervals_and_a_paired_test(run_check, tmp_path):
    outcome = run_check(f"--recipe={HOPELESS}", f"--workdir={tmp_path / 'run'}")
    printed = fields(outcome.out)
    low = 100 * stats.binomtest(PROMPTS, PROMPTS).proportion_ci(method="wilson").low
    assert printed["softmax"] == ["100.0", "%", f"{low:.1f}", "to", "100.0", "%", str(PROMPTS)]
    assert printed["the recipe"] == ["0.0", "%", "0.0", "to", f"{100 - low:.1f}", "%", str(PROMPTS)]
    assert printed["change (paired)"][0] == "-100.0"
    assert printed["prompts lost, won"] == [f"{PROMPTS},", "0"]
    p_value = stats.binomtest(0, PROMPTS).pvalue
    assert printed["McNemar, exact, two-sided"] == ["p", "=", f"{p_value:.2g}"]
    # Every row of 3 layers, 4 heads and 64 queries is dead.
    assert printed["dead rows per prompt"] == [f"{3 * 4 * 64:.1f}"]
    # A dead row is no safe row.
    assert printed["all heads"][0] == printed["dead, that is of no weight"][0] == "100.0"
    # Softmax concentrates some of these dead rows, and all of them are lost.
    assert printed["of all that it concentrates"][0] == "100.0"
    assert printed["only the recipe does: sharpened"][0] == "0.0"
    assert printed["median change of a head's output"][0] == "100.0"
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    (task,) = result["tasks"]
    assert (result["verdict"], task["verdict"], task["lost"]) == ("no-go", "no-go", PROMPTS)
    # The needle left out, softmax does not find it.
    assert task["control"]["estimate"] == 0.0 and task["control_answers"] == "left out"
    assert printed["softmax, answer left out"][0] == "0.0"
    assert result["unsafe"]["recipe"]["estimate"] == result["unsafe"]["dead"]["estimate"] == 1.0
    recorded = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert result["provenance"].pop("config_hash") and result["provenance"] == recorded


def test_unsafe_rows_are_those_of_the_audit(run_check, audited, tmp_path):
    outcome = run_check("--recipe=relu:p=4,b=auto", f"--workdir={tmp_path / 'run'}")
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary = json.loads((audited / "summary.json").read_text())
    (audit,) = (v for v in summary["verdicts"] if v["recipe"] == "relu_p4_bauto")
    assert result["bias"] == pytest.approx(summary["calibration"]["bias"])
    assert result["calibration"]["length"] == summary["calibration"]["length"] == 64
    assert fields(outcome.out)["b_auto"][-2:] == ["8", "texts"]
    assert "b_auto is " in outcome.out and " at 64" in outcome.out
    unsafe = result["unsafe"]["recipe"]
    assert unsafe["estimate"] == pytest.approx(1 - audit["safe"]["estimate"])
    assert unsafe["low"] == pytest.approx(1 - audit["safe"]["high"])
    assert unsafe["low"] <= unsafe["estimate"] <= unsafe["high"]
    against = next(
        entry
        for entry in summary["against_softmax"]
        if (entry["suite"], entry["bias_kind"], entry["p"]) == ("niah_64", "auto", 4)
    )
    assert set(result["against_softmax"]) == set(against)
    for name, value in against.items():
        ours = result["against_softmax"][name]
        if isinstance(value, dict):
            # The two resample another number of times.
            ours, value = ours["estimate"], value["estimate"]
        assert ours == pytest.approx(value), name
    rows = next(
        entry
        for entry in summary["prevalence"]
        if (entry["suite"], entry["bias_kind"]) == ("niah_64", "auto")
    )
    assert result["unsafe"]["softmax"]["estimate"] == pytest.approx(rows["softmax"]["estimate"])


def test_a_recipe_with_its_own_bias_is_measured_at_that_bias(run_check, tmp_path):
    arguments = ["--recipe=relu:p=4,b=0.5", "--top_heads=3", f"--workdir={tmp_path / 'run'}"]
    printed = fields(run_check(*arguments).out)
    rows = pq.read_table(tmp_path / "run" / "rows").to_pylist()
    measured = [row for row in rows if (row["bias"], row["target"]) == (0.5, "argmax")]
    by_head = {}
    for row in (row for row in measured if row["status"] == 1):
        if row["suite"] == "induction":
            by_head.setdefault((row["layer"], row["head"]), []).append(row["s_2"])
    assert len(by_head) == 3 * 4
    top = sorted(by_head, key=lambda head: -np.median(by_head[head]))[:3]
    needle = [row for row in measured if row["suite"] == "niah_64"]
    unsafe = [row["s_4"] >= 1 for row in needle]
    unsafe_top = [row["s_4"] >= 1 for row in needle if (row["layer"], row["head"]) in top]
    spread = [row["s_softmax"] >= 1 for row in needle]
    assert printed["bias"] == ["0.5"]
    assert printed["softmax on the same rows"][0] == f"{100 * np.mean(spread):.1f}"
    assert printed["all heads"][0] == f"{100 * np.mean(unsafe):.1f}"
    assert printed["the 3 heads of greatest S_2"][0] == f"{100 * np.mean(unsafe_top):.1f}"
    assert not (tmp_path / "run" / "calibration.json").exists()


def test_chat_needs_a_template(run_check):
    outcome = run_check("--recipe=softmax", "--chat")
    assert outcome.code == 3 and "has no chat template; leave --chat out" in outcome.err[0]


def test_b_auto_is_calibrated_on_a_text_of_the_user(run_check, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Some people sing here. Every bright day they wait there again. " * 20)
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    flags = ["--recipe=relu:p=4,b=auto", "--n=2"]
    run_check(*flags, f"--calibration_text={text}", f"--workdir={own}")
    run_check(*flags, f"--workdir={shipped}")
    results = [json.loads((each / "calibration.json").read_text()) for each in (own, shipped)]
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert [each["text"] for each in results] == [digest, ""]
    assert results[0]["bias"] != results[1]["bias"]
    # Of twelve words and two stops, pieces of the length of the needles.
    assert results[0]["length"] == 64 and results[0]["texts"] == 20 * 14 // 64
    refused = run_check(*flags, f"--calibration_text={text}", "--calibration_length=200")
    assert refused.code == 3 and "takes two pieces of as many tokens, 400 in all" in refused.err[0]


def test_own_prompts_are_a_task_that_decides_like_the_needle(run_check, prompts_file, tmp_path):
    arguments = [f"--recipe={HOPELESS}", f"--prompts={prompts_file}"]
    outcome = run_check(*arguments, f"--workdir={tmp_path / 'run'}")
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    needle, own = result["tasks"]
    assert (needle["name"], own["name"]) == ("needle", f"prompts:{prompts_file}")
    assert (own["softmax"]["estimate"], own["recipe"]["estimate"]) == (1.0, 0.0)
    assert own["softmax"]["n"] == own["lost"] == 9
    # Each prompt was asked for the answer to another one.
    assert (own["control"]["estimate"], own["control_answers"]) == (0.0, "another prompt's")
    assert outcome.code == 10 and result["verdict"] == own["verdict"] == "no-go"
    for each in (needle, own):
        assert each["name"] in result["reason"]
        p_value = stats.binomtest(0, each["lost"]).pvalue
        assert each["p_value"] == pytest.approx(p_value)
    # Of two p, the smaller is doubled.
    assert own["p_holm"] == pytest.approx(2 * own["p_value"])
    assert needle["p_holm"] == pytest.approx(max(needle["p_value"], own["p_holm"]))
    kept = run_check("--recipe=relu:p=4,b=0", f"--task=prompts:{prompts_file}", "--n=3")
    assert kept.code == 11 and "prompts answered" not in kept.out
    assert fields(kept.out)["the recipe"][0] == "100.0"


def test_a_task_that_the_model_fails_is_named_and_leaves_the_verdict_to_the_others(
    run_check, prompts_file, tmp_path
):
    tasks = ["--task=niah", "--task=induction"]
    outcome = run_check(f"--recipe={HOPELESS}", *tasks, f"--workdir={tmp_path / 'run'}")
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(each["name"], each["verdict"]) for each in result["tasks"]] == [
        ("needle", "no-go"),
        ("induction", "undecidable"),
    ]
    failing = result["tasks"][1]
    assert "which does not show that it solves" in failing["reason"]
    assert outcome.code == 10 and "induction" not in result["reason"]
    # Its p is not among those that are corrected together.
    assert result["tasks"][0]["p_holm"] == result["tasks"][0]["p_value"]
    alone = run_check(f"--recipe={HOPELESS}", "--task=induction")
    assert alone.code == 11 and "\nverdict   UNDECIDED\n" in alone.out


def test_prompts_that_all_have_one_answer_decide_nothing(run_check, tmp_path):
    path, noun = tmp_path / "mine.jsonl", "apple"
    words = ["People sing", "Some wait", "People travel", "Some work", "People wait"]
    rows = [
        {"id": f"{i}", "prompt": f"The secret word is {noun}. {each}. The secret word is"}
        | {"answer": f" {noun}"}
        for i, each in enumerate(words)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    outcome = run_check(f"--recipe={HOPELESS}", f"--task=prompts:{path}")
    assert outcome.code == 11
    assert "no prompt has another answer of as many tokens" in " ".join(outcome.out.split())


def test_without_a_work_folder_the_check_has_one_of_its_settings(
    tiny, haystack, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = [f"--model={tiny}", f"--haystack={haystack}", "--length=64", "--n=7"]
    first, again = (run_study(STUDY, [*flags, "--recipe=softmax"]) for _ in range(2))
    assert first.code == again.code == 11
    assert again.out.startswith("finished 20") and again.out.endswith(first.out)
    (folder,) = (tmp_path / "runs" / "check").iterdir()
    assert re.fullmatch(r"tiny-softmax-[0-9a-f]{8}", folder.name)
    assert first.out.endswith(f"report: {folder / 'report.html'}\n")
    settings = [CheckConfig(model=str(tiny), n=n) for n in (7, 8)]
    assert len({one.default_folder() for one in settings}) == 2
    # A text that is edited is another check, which needs no --workdir.
    text, folders = tmp_path / "mine.txt", set()
    for words in ("one", "another"):
        text.write_text(words)
        folders.add(CheckConfig(model=str(tiny), text=str(text)).default_folder())
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model="], 2, "--model is missing"),
        (["--recipe=relu_p4_bato"], 2, "did you mean 'relu_p4_bauto'"),
        (["--mesh=2,2"], 2, "--mesh=2,2 is not three whole numbers; write 8,1,1"),
        (["--n=0"], 2, "n=0"),
        (["--task=niha"], 2, "--task=niha is no task; did you mean 'niah'?"),
        (["--task=choices:arc"], 2, "there are no questions 'arc'; did you mean 'arc_"),
        (["--task=prompts:"], 2, "write prompts:FILE or choices:NAME"),
        (["--task=niah", "--task=needle"], 2, "twice: needle, needle; name each once"),
        (["--task=prompts:no/such.jsonl"], 3, "no/such.jsonl: No such file or directory"),
        (["--length=many"], 2, "length=many"),
        (["--dtype=float16"], 2, "float32|bfloat16"),
        (["--modle=x"], 2, "--modle is not a flag of this command; did you mean 'model'?"),
        (["--prompts=no/such.jsonl"], 3, "no/such.jsonl: No such file or directory"),
        (["--model=no/such"], 3, "model 'no/such' is no folder or .gguf file"),
        (["--length=512"], 3, "--length=512: the model has 256 positions"),
    ],
)
def test_what_cannot_be_checked_is_one_line(run_check, arguments, code, words):
    outcome = run_check("--recipe=softmax", *arguments)
    assert (outcome.code, outcome.out, len(outcome.err)) == (code, "", 1)
    assert words in outcome.err[0]


def test_words_that_the_tokenizer_cuts_unequally_are_refused_before_anything_is_computed(
    run_check, tmp_path
):
    words = tmp_path / "words.txt"
    words.write_text("ein zwei drei")
    outcome = run_check("--recipe=softmax", f"--needle_words={words}")
    assert (outcome.code, outcome.out, len(outcome.err)) == (3, "", 1)
    assert "--needle_words: nouns: 0 of 3 are one token" in outcome.err[0]
