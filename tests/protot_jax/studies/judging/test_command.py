"""The command from runs to its page: texts, verdicts, who may rate, what is refused."""

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate import generation, verdicts
from lm_jax.evaluate.answers import digest
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.study import command, frame
import protot_jax
from protot_jax.studies.judging import STUDY, continuations, judges, report
from protot_jax.studies.judging.settings import JudgingConfig
from protot_jax.training import saved_run
from tests import tiny

# All test documents of the run; more are asked for.
COUNT = 14
# The first seeds of both runs.
OWN, OTHER = "protot, seed 1", "protot, seed 2"
HEADS = ("Text", "Continuation A", "Continuation B")
FLAGS = (
    "--count=20",
    "--prompt_tokens=12",
    "--new_tokens=8",
    "--resamples=100",
    "--no_repeat_ngram=2",
)


def launched(*flags):
    return command.run(STUDY, ["judge", *flags])


@pytest.fixture(scope="module")
def runs(run, tmp_path_factory):
    """Two runs of one corpus: the second has the other seed's weights."""
    other = tmp_path_factory.mktemp("other") / "other"
    shutil.copytree(run, other)
    config = json.loads((other / CONFIG_FILE).read_text("utf-8"))
    config["seeds"] = config["seeds"][::-1]
    (other / CONFIG_FILE).write_text(json.dumps(config), "utf-8")
    return run, other


@pytest.fixture(scope="module")
def reference_model(run, tmp_path_factory):
    """A language model that has learnt nothing."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    tokenizer = protot_jax.load_run(run).tokenizer
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=64)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(folder, cfg, params, tokenizer)
    return folder


@pytest.fixture(scope="module")
def judged(runs, reference_model, tmp_path_factory):
    """The flags and the folder of a run with a file without answers and an untrained judge."""
    folder = tmp_path_factory.mktemp("judging")
    (folder / "answers.jsonl").touch()
    named = [f"--run={run}" for run in runs]
    flags = [*named, *FLAGS, f"--judge=cached:{folder / 'answers.jsonl'}"]
    flags += [f"--judge=perplexity:{reference_model}", f"--workdir={folder / 'work'}"]
    assert launched(*flags) == 0
    return flags, folder


def loaded(folder):
    return frame.load_summary(STUDY, folder / "work")


def test_prompts_are_test_documents_and_the_texts_are_measured(judged, runs):
    _, folder = judged
    result, rows = loaded(folder), pq.read_table(folder / "work" / "rows.parquet").to_pylist()
    assert result.settings.prompts == COUNT and result.settings.same_data
    assert len(rows) == 2 * 2 * COUNT and {row["model"] for row in rows} == {OWN, OTHER}
    tokenizer = protot_jax.load_run(runs[0]).tokenizer
    for row in rows:
        assert 0 < row["tokens"] <= 8 and row["words"] == len(row["text"].split())
        ids = tokenizer.encode(row["prompt_text"], add_special_tokens=False)
        # The mark of the beginning is one of the twelve.
        assert len(ids) == 11
    for one in result.measured[:-1]:
        own = [row for row in rows if (row["model"], row["decoding"]) == (one.model, one.decoding)]
        assert one.bleu.estimate == pytest.approx(np.mean([row["bleu"] for row in own]))
        texts = [row["text"] for row in own]
        assert one.distinct[0] == generation.distinct(texts, 1)
        bleu = generation.bleu(texts, [row["reference"] for row in own])
        assert bleu.sentences == tuple(row["bleu"] for row in own)
        rouge = generation.rouge_l(texts, [row["reference"] for row in own])
        assert rouge == tuple(row["rouge_l"] for row in own)
        assert one.rouge_l.estimate == pytest.approx(np.mean(rouge))
    assert result.measured[-1].model == "reference"
    assert result.measured[-1].bleu is result.measured[-1].rouge_l is None
    best = max(
        (row for row in rows if (row["model"], row["decoding"]) == (OWN, "greedy")),
        key=lambda row: row["bleu"],
    )
    assert result.samples[0].prompt == best["prompt_text"]
    assert result.samples[0].answers[0].text == best["text"]
    assert result.samples[0].answers[0].rouge_l == best["rouge_l"]


def test_sampled_texts_have_the_penalties(judged, runs):
    _, folder = judged
    tokenizer = protot_jax.load_run(runs[0]).tokenizer
    rows = pq.read_table(folder / "work" / "rows.parquet").to_pylist()
    for row in rows:
        ids = tokenizer.encode(row["prompt_text"] + row["text"], add_special_tokens=False)
        pairs = list(itertools.pairwise(ids))
        # Those of the prompt may be there twice; a new one is not in the text before it.
        new = range(10, len(pairs))
        if row["decoding"] == "sampled":
            assert all(pairs[i] not in pairs[:i] for i in new)


def test_a_judge_that_always_says_a_flips_all_and_rates_nothing(judged):
    _, folder = judged
    result = loaded(folder)
    first = result.judges[0]
    assert first.name == "null:first" and not first.rates and first.position.estimate == 1
    for one in first.decodings:
        assert one.consistency.flips.estimate == 1 and one.consistency.kappa == 0
        assert one.ratings is None
        assert one.no_ratings == "the judge failed the controls shuffled, other, looped"


def test_no_judge_that_reads_nothing_or_learnt_nothing_rates(judged):
    _, folder = judged
    result = loaded(folder)
    assert [judge.name.split(":")[0] for judge in result.judges] == ["null"] * 3 + [
        "cached",
        "perplexity",
    ]
    assert not any(judge.rates for judge in result.judges)
    # One that always says A.
    first = result.judges[0]
    assert first.name == "null:first" and first.position.estimate == 1
    for one in first.decodings:
        assert one.consistency.flips.estimate == 1 and one.consistency.kappa == 0
        assert one.no_ratings == "the judge failed the controls shuffled, other, looped"
    # Position is nothing to a judge without a prompt.
    assert all(one.consistency.flips.estimate == 0 for one in result.judges[4].decodings)
    built = report.build(JudgingConfig(), result, folder)
    page, printed = ("".join(one.body for one in built.sections()), "\n".join(built.lines))
    assert "ended, %" in page and "ROUGE-L" in page and "Bradley-Terry ratings" not in page
    assert printed.count("no ratings") == 10 and "ROUGE-L" in printed


def joined(text):
    return " ".join(text.split())


def parts(asked):
    """The text and both continuations of a question."""
    text, first, second = (asked.split(f"{head}:\n")[1].split("\n\n")[0] for head in HEADS)
    return text, first, second


def test_a_file_of_answers_rates_once_it_knows_real_from_worse(judged, capsys):
    """Whoever answers the listed prompts needs nothing else."""
    flags, folder = judged
    file, work = folder / "answers.jsonl", folder / "work"
    rows = pq.read_table(work / "rows.parquet").to_pylist()
    own = {joined(row["text"]) for row in rows if row["model"] == OWN}
    real = {(joined(row["prompt_text"]), joined(row["reference"])) for row in rows}
    asked = [
        json.loads(line)
        for line in (folder / "answers.jsonl.missing").read_text("utf-8").splitlines()
    ]
    replies = []
    for one in asked:
        prompt, first, second = parts(one["prompt"])
        # Real text before any other; of the models, each by half of the prompts.
        liked = int(digest(prompt), 16) % 2 == 0
        rank = [2 * ((prompt, text) in real) + ((text in own) == liked) for text in (first, second)]
        answer = "Tie" if rank[0] == rank[1] else "AB"[rank[1] > rank[0]]
        replies.append(json.dumps({"prompt_sha256": one["prompt_sha256"], "answer": answer}))
    file.write_text("\n".join(replies), "utf-8")
    shards = {path.name for path in (work / continuations.FOLDER).iterdir()}
    assert launched(*flags) == 3
    assert f"(judge cached:{file}: content " in capsys.readouterr().err
    assert launched(*flags, "--resume=force") == 0
    # Nothing is generated again.
    assert {path.name for path in (work / continuations.FOLDER).iterdir()} == shards
    (cached,) = (judge for judge in loaded(folder).judges if judge.name.startswith("cached"))
    assert cached.rates and cached.unreadable == 0
    for one in cached.decodings:
        (duel,) = one.duels
        assert duel.won + duel.tied + duel.lost == 2 * COUNT and one.consistency.flips.estimate == 0
        rating = {each.model: each for each in one.ratings}
        assert rating[OWN].elo.estimate + rating[OTHER].elo.estimate == pytest.approx(2000)
        # Two players: the log ratio of their wins, and nothing was shrunk.
        gap = rating[OWN].strength.estimate - rating[OTHER].strength.estimate
        sign = 1 if duel.left == OWN else -1
        shares = duel.won + duel.tied / 2, duel.lost + duel.tied / 2
        assert one.ridge == 0 and gap == pytest.approx(
            sign * 400 * np.log10(shares[0] / shares[1]), abs=1e-6
        )
    # A file from before, of a judge that prefers loops: its ratings are there, and not printed.
    loops = verdicts.control("looped", np.zeros((COUNT, 2)))
    controls = tuple(loops if each.kind == "looped" else each for each in cached.controls)
    before = dataclasses.replace(cached, controls=controls)
    printed = "\n".join(report.findings(dataclasses.replace(loaded(folder), judges=(before,))))
    assert printed.count("no ratings, the judge failed the control looped") == 2
    assert "online Elo" not in printed


def test_prompts_of_a_file_are_used(runs, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "the house of", "reference": f"a river {word}"} for word in ("met", "in")]
    lines.insert(1, {"prompt": " ", "reference": "town"})
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    flags = [f"--run={runs[0]}", f"--prompts={file}", "--new_tokens=4", "--resamples=100"]
    assert launched(*flags, f"--workdir={tmp_path / 'work'}") == 0
    assert "one model has no opponent" in capsys.readouterr().out
    result = loaded(tmp_path)
    page = (tmp_path / "work" / "report.html").read_text("utf-8")
    assert "No ratings: one model has no opponent" in page and "1 trained model continued" in page
    assert (result.settings.source, result.settings.prompts) == ("mine.jsonl", 2)
    assert result.settings.skipped == 1 and result.samples[0].prompt == "the house of"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run=", "--run="), "name"),
        (("--judge=null:none",), "judge = 'null:none' is unknown"),
        (("--judge=null:coin", "--judge=null:coin"), "is given twice"),
        (("--temperature=0",), "temperature = 0 is greedy"),
        (("--top_p=2",), "top_p = 2.0"),
        (("--prompt_tokens=500",), "too short; give at least 2"),
        (("--prompts=absent.jsonl",), "absent.jsonl: No such file or directory; give a readable"),
        (("--prompts={broken}",), "broken:2: prompt and reference must be strings"),
        (("--prompts={single}",), "1 can be used and 0 are too short"),
        (("--run={run}",), "is the same model as"),
        (("--judge=perplexity:{copy}",), "would prefer itself"),
        (("--judge=cached:absent",), "absent is not a file of answers"),
    ],
)
def test_bad_input_is_one_sentence_and_claims_no_folder(runs, flags, message, tmp_path, capsys):
    entry = json.dumps({"prompt": "the house", "reference": "of a river"})
    (tmp_path / "broken").write_text(f'{entry}\n{{"prompt": "the"}}\n', "utf-8")
    (tmp_path / "single").write_text(entry, "utf-8")
    places = {name: tmp_path / name for name in ("broken", "single", "copy")}
    if "{copy}" in flags[0]:
        shutil.copytree(runs[0], places["copy"])
    filled = [flag.format(run=runs[0], **places) for flag in flags]
    folder = tmp_path / "none"
    assert launched(f"--run={runs[0]}", *FLAGS, *filled, f"--workdir={folder}") in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not (folder / CONFIG_FILE).exists()


def test_without_a_run_the_flag_is_named(capsys):
    assert launched() == 2
    assert "--run is missing; name the work folder" in capsys.readouterr().err


def test_without_a_folder_the_results_are_below_the_first_run():
    asked = JudgingConfig(run=("runs/a/seed_2", "runs/b"))
    place = asked.default_folder()
    assert place.parent.as_posix() == "runs/a/judging"
    assert dataclasses.replace(asked, count=9).default_folder() != place


def test_a_prompt_that_exceeds_the_context_of_attention_is_refused(run):
    model = protot_jax.load_run(run)
    config = dataclasses.replace(model.config, model="llama", tie_embeddings=False)
    cfg, mixer = saved_run.model(config, 60)
    llama = dataclasses.replace(model, cfg=cfg, mixer=mixer, params={})
    prompts = ["the house of a river"]
    length = len(continuations.prompt_ids({"llama": llama}, prompts, 1)["llama"][0])
    continuations.prompt_ids({"llama": llama}, prompts, cfg.max_length - length)
    with pytest.raises(UsageError, match=f"come to {cfg.max_length + 1} tokens, and the context"):
        continuations.prompt_ids({"llama": llama}, prompts, cfg.max_length - length + 1)
    continuations.prompt_ids({"protot": model}, prompts, 10 * cfg.max_length)


def test_a_run_is_told_from_a_pretrained_folder(run, reference_model):
    assert judges.is_run(run) and not judges.is_run(reference_model)


def test_a_judge_that_is_gone_is_no_input(tmp_path):
    assert judges.inputs(f"tokens:{tmp_path / 'gone'}") == {}
