"""The command from a run to its report, and what the report says, measured again."""

import dataclasses
import itertools
import json
import logging
import math

import jsonschema
import numpy as np
import pytest
from scipy import stats as scipy_stats

from lm_jax.errors import BadInputError
from lm_jax.evaluate import judge
from lm_jax.evaluate.judge import Label
from lm_jax.run.files import to_jsonable
from lm_jax.run.results import json_schema, load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.study import command, frame
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import open_prepared
import protot_jax
from protot_jax.studies.concepts import STUDY, collect, lag, measures, numbers, report, units
from protot_jax.studies.concepts import run as concepts
from protot_jax.studies.concepts.results import ConceptReport
from tests import rounding
from tests.protot_jax.studies.concepts import stored

U = 2.0**-24
SCHEMA = json_schema(ConceptReport)

LABEL = {
    "theme": "towns",
    "disentanglement": 4,
    "coverage": 7.5,
    "themes": 3,
    "explanation": "Most texts name a town.",
}


class Recorder:
    """A judge that gives every prototype the same label and keeps the texts it was asked about."""

    name = "recorder"

    def __init__(self):
        self.prompts = []

    def label(self, texts):
        self.prompts.append(texts)
        return Label(**LABEL)


def launched(*flags):
    return command.run(STUDY, ["iaj protot concepts", *flags])


@pytest.fixture(scope="module")
def reported(run):
    """What the command wrote into the run, with little of everything."""
    assert launched(f"--run={run}", "--length=16", "--top=3", "--resamples=99") == 0
    folder = run / "concepts"
    return folder, json.loads((folder / frame.SUMMARY).read_text("utf-8"))


def test_the_report_keeps_to_its_schema(reported):
    folder, content = reported
    jsonschema.validate(content, SCHEMA)
    recorded = json.loads((folder / "provenance.json").read_text("utf-8"))
    assert read_table_provenance(folder / "activations.parquet") == recorded
    assert content["model"]["seed"] == 1
    assert len(content["prototypes"]) == 2 * 4
    for each in content["prototypes"]:
        for top in each["top_texts"]:
            tokens = content["texts"][top["text"]]["tokens"]
            assert {len(top[name]) for name in ("write", "read", "memory")} == {len(tokens)}


def test_the_first_layer_takes_no_part_in_the_lag_test(reported):
    _, content = reported
    first = [each for each in content["prototypes"] if each["layer"] == 0]
    assert all(each["lag"] is None for each in first)
    assert {c for each in first for c in each["cross_correlation"]} == {None}
    texts = content["settings"]["texts"]
    for name in ("lead", "own_lead"):
        assert (content["lag"][name]["prototypes"], content["lag"][name]["texts"]) == (4, texts)
    assert content["half_life_repetition"]["spearman"]["prototypes"] == 8


def collected(run, folder):
    """The model, and the texts of the reports."""
    model = protot_jax.load_run(run)
    data = Examples(open_prepared(run / "data"), "validation", context=15)
    path = folder / "again.parquet"
    return model, collect.collect(model, data, path, texts=4_000, batch_size=64)


def test_numbers_of_the_report_follow_from_the_stored_gates(run, reported, tmp_path):
    folder, content = reported
    model, texts = collected(run, tmp_path)
    write_NTR, read_NTR = (
        collect.gates_of_layer(folder / collect.ACTIVATIONS, texts, gate, 1)
        for gate in collect.GATES
    )
    token_mask_NT = texts.token_mask_NT
    assert content["settings"]["texts"] == len(write_NTR)
    assert content["settings"]["tokens"] == token_mask_NT.sum()
    loss_M = texts.loss_NT[token_mask_NT & (np.arange(16) > 0)]
    perplexity = np.exp(loss_M.mean(dtype=np.float64))
    # Means of float32 losses in other batches.
    assert content["model"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    entries = [each for each in content["prototypes"] if each["layer"] == 1]
    logit_R = np.float64(model.params["blocks"]["mixer"]["decay_logit"][1])
    for r, entry in enumerate(entries):
        # Of numbers in float16 float64 makes exact sums, in whatever order.
        means = [
            gate[counted].mean(dtype=np.float64)
            for gate, counted in zip(write_NTR[..., r], token_mask_NT, strict=True)
        ]
        best = np.argsort(-np.array(means), kind="stable")[:3]
        documents = [content["texts"][top["text"]]["document"] for top in entry["top_texts"]]
        assert documents == texts.document_N[best].tolist()
        assert [top["mean"] for top in entry["top_texts"]] == [means[text] for text in best]
        beta = entry["decay"]
        # An exponential, a sum and a division in float32; the half-life is of the logit.
        assert beta == pytest.approx(1 / (1 + np.exp(-logit_R[r])), rel=8 * U)
        assert entry["half_life"] == pytest.approx(np.log(2) / np.log1p(np.exp(-logit_R[r])))
        # Memory also holds what `<bos>` wrote, which is before the first token listed.
        write_T = np.float64(write_NTR[best[0], :, r])
        memory = [
            (1 - beta) * sum(beta ** (i - 1 - j) * write_T[j] for j in range(i)) for i in range(16)
        ]
        # Printed with five digits, after four operations a step on numbers below 1.
        assert entry["top_texts"][0]["memory"] == pytest.approx(
            np.array(memory)[token_mask_NT[best[0]]], rel=0, abs=0.5e-5 + 16 * 4 * U
        )
        gate_M = write_NTR[token_mask_NT][:, r]
        assert entry["write"]["mean"] == gate_M.mean(dtype=np.float64)
        result = measures.mutual_information(texts.token_NT[token_mask_NT], gate_M)
        assert entry["write"]["mutual_information"] == result
    layer = content["layers"][1]
    # The same numbers in float64, added in another order.
    assert layer["read"]["gini"] == pytest.approx(
        measures.gini(read_NTR[token_mask_NT]).mean(), rel=token_mask_NT.sum() * 2.0**-52
    )
    of_layer = lag.of_layer(write_NTR, read_NTR, token_mask_NT)
    correlations = [each["cross_correlation"] for each in entries]
    np.testing.assert_array_equal(correlations, of_layer.correlation_RK)
    # The headline numbers are of these gates, and of layers kept apart.
    settings = {name: content["settings"][name] for name in ("resamples", "seed")}
    tests = lag.tests([of_layer], **settings)
    for name in ("lead", "own_lead"):
        assert content["lag"][name] == dataclasses.asdict(getattr(tests, name))
    ranks = []
    for layer in range(2):
        of_one = [each for each in content["prototypes"] if each["layer"] == layer]
        for name in ("half_life", "repetition"):
            ranked = scipy_stats.rankdata([each[name] for each in of_one])
            ranks.append(ranked - ranked.mean())
    half_life_Q, repetition_Q = np.hstack(ranks[::2]), np.hstack(ranks[1::2])
    # Ranks are halves, so that all but the root and the quotient is exact.
    squares = (half_life_Q @ half_life_Q) * (repetition_Q @ repetition_Q)
    within = half_life_Q @ repetition_Q / math.sqrt(squares)
    spearman = content["half_life_repetition"]["spearman"]["value"]
    assert spearman == pytest.approx(within, rel=4 * 2.0**-53)
    assert spearman != content["half_life_repetition"]["overall_spearman"]


def test_a_prototype_that_forgets_at_once_has_a_half_life_of_zero(reported):
    result = load_result(reported[0] / frame.SUMMARY, ConceptReport)
    ones = [dataclasses.replace(each, half_life=0.0) for each in result.prototypes]
    ones[-1] = dataclasses.replace(ones[-1], half_life=None)
    lines = report.format_lines(dataclasses.replace(result, prototypes=tuple(ones)))
    assert lines[1].endswith("maximum: 0.00, 0.00, 0.00, 0.00, inf")


def test_a_judge_sees_words_and_also_random_texts(run, tmp_path, caplog, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(concepts, "build_judge", lambda *_: recorder)
    opened = concepts.inputs

    def of_joined_documents(config):
        found = opened(config)
        model = found.loaded.model
        model = dataclasses.replace(
            model, config=dataclasses.replace(model.config, examples="join")
        )
        return dataclasses.replace(found, loaded=found.loaded._replace(model=model))

    monkeypatch.setattr(concepts, "inputs", of_joined_documents)
    settings = STUDY.config(run=str(run), length=16, top=2, resamples=99)
    content = to_jsonable(frame.execute(STUDY, settings, tmp_path / "own"))
    assert "trained on documents joined into rows" in caplog.text
    jsonschema.validate(content, SCHEMA)
    assert content["settings"]["judge"] == "recorder"
    assert all(each["label"] == LABEL for each in content["prototypes"])
    assert len(content["baseline"]) == numbers.BASELINE_DRAWS
    assert len(recorder.prompts) == 8 + numbers.BASELINE_DRAWS
    for words, gates in recorder.prompts[0]:
        assert len(words) == len(gates)
        assert "".join(words) in ["".join(text["words"]) for text in content["texts"]]
    for draw in content["baseline"]:
        assert len(set(draw["texts"])) == 2
        assert draw["label"] == LABEL


def test_texts_in_other_batches_give_the_same_numbers(run, reported, tmp_path):
    folder, content = reported
    flags = ("--length=16", "--top=3", "--resamples=99", "--batch_size=7")
    assert launched(f"--run={run}", f"--workdir={tmp_path / 'b'}", *flags) == 0
    again = json.loads((tmp_path / "b" / frame.SUMMARY).read_text("utf-8"))
    assert again["settings"] == content["settings"]
    model, texts = collected(run, tmp_path)
    wanted = stored.expected(model, texts.token_NT)
    token_mask_NT = texts.token_mask_NT[:, 1:]
    perplexity = stored.perplexity(*(each[0][token_mask_NT] for each in wanted))
    for found, path in ((content, folder), (again, tmp_path / "b")):
        rounding.assert_within(found["model"]["perplexity"], perplexity)
        gates = stored.gates(path / collect.ACTIVATIONS, texts, model.cfg.num_layers)
        rounding.assert_within(gates, rounding.Expected(*(each[1] for each in wanted)))
        for entry, gate in itertools.product(found["prototypes"], collect.GATES):
            gate_M = gates[gate][entry["layer"], texts.token_mask_NT, entry["prototype"]]
            assert entry[gate]["mean"] == gate_M.mean(dtype=np.float64)


def test_answers_that_were_filled_in_make_another_report(run, tmp_path, capsys):
    answers, folder = tmp_path / "answers.jsonl", tmp_path / "labelled"
    answers.touch()
    flags = (f"--run={run}", f"--workdir={folder}", f"--judge=cached:{answers}", "--length=16")
    assert launched(*flags) == 0
    text = capsys.readouterr().out
    prompts = (tmp_path / "answers.jsonl.missing").read_text("utf-8").splitlines()
    assert "labelled 0 of 18" in text
    lines = [json.loads(line) | {"answer": json.dumps(LABEL)} for line in prompts]
    answers.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    assert launched(*flags) == 3
    assert f"(judge cached:{answers}: content " in capsys.readouterr().err
    assert launched(*flags, "--resume=force") == 0
    assert "labelled 18 of 18" in capsys.readouterr().out
    # What was labelled can be told from the file alone: 2 layers of 3 prototypes, 12 random texts.
    used = [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]
    assert len(used) == 18 and {line["judge"] for line in used} == {"cached:answers.jsonl"}
    units = {line["unit"] for line in used}
    assert {f"L{layer} P{r}" for layer in range(2) for r in range(3)} < units and len(units) == 18
    digest = protot_jax.load_run(run).checkpoint_sha256
    assert {line["model"].split(", ")[-1] for line in used} == {digest[:16]}
    content = json.loads((folder / frame.SUMMARY).read_text("utf-8"))
    jsonschema.validate(content, SCHEMA)
    assert {each["label"]["theme"] for each in content["prototypes"] + content["baseline"]} == {
        "towns"
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it has no answers"),
        ([{"unit": "L0 P0", "model": "protot, seed 9"}], "are of another model (protot, seed 9)"),
        (
            [{"unit": f"L{k // 4} P{k % 4}", "model": "own"} for k in (0, 1, 2, 3, 5, 6, 7)],
            "1 of 8 prototypes have no answer, first L1 P0",
        ),
        ([{"answer": "towns"}], "1 of 1 answers are not the requested JSON"),
    ],
)
def test_answers_that_do_not_fit_are_named_before_anything_is_computed(
    run, tmp_path, monkeypatch, caplog, lines, message
):
    own = units.identity(protot_jax.load_run(run))
    answers = tmp_path / "answers.jsonl"
    with answers.open("w", encoding="utf-8") as file:
        for k, line in enumerate(lines):
            entry = {"prompt_sha256": f"{k:064}", "answer": json.dumps(LABEL)} | line
            if entry.get("model") == "own":
                entry["model"] = own
            file.write(f"{json.dumps(entry)}\n")
    said = []

    def computed(*_, **__):
        said.extend(record.getMessage() for record in caplog.records)
        raise BadInputError("reached")

    monkeypatch.setattr(concepts.collect, "collect", computed)
    flags = (f"--run={run}", f"--workdir={tmp_path / 'a'}", f"--judge=cached:{answers}")
    with caplog.at_level(logging.WARNING):
        assert launched(*flags, "--length=16") == 3
    (found,) = [each for each in said if "cached:" in each]
    assert message in found


def test_answers_that_all_fit_are_not_warned_of(run, tmp_path, caplog):
    answers = tmp_path / "answers.jsonl"
    model = protot_jax.load_run(run)
    own = {"model": units.identity(model), "answer": json.dumps(LABEL)}
    lines = [
        own | {"prompt_sha256": f"{k:064}", "unit": f"L{k // 4} P{k % 4}"} for k in range(8)
    ] + [{"prompt_sha256": "f" * 64, "answer": json.dumps(LABEL)}]
    for some in (lines[:8], lines[-1:]):
        answers.write_text("".join(f"{json.dumps(line)}\n" for line in some), "utf-8")
        config = STUDY.config(run=str(run), judge=f"cached:{answers}")
        with caplog.at_level(logging.WARNING):
            concepts.warn_of_answers(config, model)
        assert not caplog.records


def test_settings_of_the_judge_reach_it(tmp_path, monkeypatch):
    sent = {}
    monkeypatch.setattr(judge, "build_judge", lambda name, **given: sent.update(given, name=name))
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("theme disentanglement coverage themes explanation", "utf-8")
    own = {"rubric": str(rubric), "marked": 1.0, "judge_texts": 2}
    own |= {"judge_temperature": 1.0, "judge_tokens": 756, "judge": "chat:m@http://localhost:1/v1"}
    concepts.build_judge(STUDY.config(run="run", **own), tmp_path)
    assert sent == {
        "name": own["judge"],
        "answers": tmp_path,
        "rubric": concepts.read_rubric(rubric),
        "marked": 1.0,
        "most_texts": 2,
        "temperature": 1.0,
        "max_new_tokens": 756,
    }


def test_a_seed_of_the_run_can_be_chosen(run, tmp_path, capsys):
    flags = (f"--workdir={tmp_path / 'two'}", "--texts=5", "--length=16", "--rank_by=sum")
    assert launched(f"--run={run}", "--run_seed=2", *flags) == 0
    text = capsys.readouterr().out
    assert "5 texts of the validation split" in text
    content = json.loads((tmp_path / "two" / frame.SUMMARY).read_text("utf-8"))
    assert (content["model"]["seed"], content["settings"]["rank_by"]) == (2, "sum")
    # A statistic is printed with the interval and the p of its own hypothesis.
    lag = content["lag"]
    for about, result in (
        ("lead over lag 0: ", lag["lead"]),
        ("over other prototypes: ", lag["own_lead"]),
        ("within layers: Spearman ", content["half_life_repetition"]["spearman"]),
    ):
        (line,) = [line for line in text.splitlines() if about in line]
        value, low, high, p = (
            "?" if result[name] is None else f"{result[name]:.3f}"
            for name in ("value", "low", "high", "p")
        )
        counts = f"{result['prototypes']} prototypes, 5 texts"
        assert line.endswith(f"{about}{value} ({low} to {high}, p {p}; {counts})")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "--run is missing"),
        (["--run=nowhere"], 3, "is no run"),
        (["--run={run}", "--run_seed=3"], 2, "seed = 3 is none of 1, 2"),
        (["--run={run}", "--judge=oracle"], 2, "judge = 'oracle' is unknown"),
        (["--run={run}", "--length=5"], 2, "--length"),
        (["--run={run}", "--marked=1.5"], 2, "marked = 1.5 must be a share of the words"),
        (["--run={run}", "--marked=0"], 2, "marked = 0.0 must be a share of the words"),
        (["--run={run}", "--judge_texts=0"], 2, "--judge_texts"),
        (["--run={run}", "--judge_temperature=-1"], 2, "--judge_temperature"),
        (["--run={run}", "--judge_tokens=9"], 2, "judge = 'null' generates nothing"),
        (["--run={run}", "--rubric={rubric}"], 3, "does not ask for disentanglement, coverage"),
        (["--run={attention}"], 2, "trained 'llama', which has no prototypes"),
    ],
)
def test_what_cannot_be_done_is_refused(run, attention_run, flags, code, message, tmp_path, capsys):
    (tmp_path / "rubric").write_text("theme", "utf-8")
    places = {"run": run, "attention": attention_run, "rubric": tmp_path / "rubric"}
    flags = [flag.format(**places) for flag in flags]
    assert launched(*flags, f"--workdir={tmp_path / 'out'}") == code
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
