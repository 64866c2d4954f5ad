"""The lm-evaluation-harness over our scoring returns our accuracies."""

import dataclasses
import functools
import importlib.resources
import importlib.util
import itertools

import jinja2
import numpy as np
import pytest
import yaml

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate import harness
from lm_jax.evaluate.multiple_choice import TASKS, compare, open_cache
from lm_jax.evaluate.multiple_choice.comparison import DELIMITER, METRICS
from lm_jax.evaluate.multiple_choice.likelihood import encode
from tests import tiny
from tests.lm_jax.evaluate import tiny_multiple_choice
from tests.lm_jax.evaluate.tiny_multiple_choice import QUESTIONS


def test_a_generated_text_ends_at_any_end_that_the_tokenizer_names():
    tokenizer = tiny_multiple_choice.scorer().tokenizer
    ids = encode(tokenizer, "the cat sang a song")
    several = dataclasses.replace(tokenizer, other_stop_ids=(ids[3], ids[2]))
    assert harness._cut(several, ids, []) == tokenizer.decode(ids[:2])
    assert harness._cut(several, ids[:2], "cat") == tokenizer.decode(ids[:2]).split("cat")[0]


@pytest.fixture(scope="module")
def lm_eval():
    return pytest.importorskip("lm_eval", reason="needs lm-eval: requirements/eval.txt")


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
def test_the_harness_finds_our_accuracies(template):
    questions = {"made": QUESTIONS, "last": QUESTIONS[3:]}
    results = []
    for seed in range(3):
        scorer = tiny_multiple_choice.scorer(
            seed, tokenizer=tiny_multiple_choice.tokenizer(template=template)
        )
        ours = compare({"dense": scorer}, questions)["tasks"]
        results.append(harness.evaluate(scorer, questions))
        assert results[-1] == {
            task: {
                metric: pytest.approx(of_metric["accuracy"]["dense"]["estimate"])
                for metric, of_metric in of_task["metrics"].items()
            }
            for task, of_task in ours.items()
        }
    assert len({str(each) for each in results}) > 1


@pytest.mark.slow
def test_the_harness_splits_tokens_as_we_do(lm_eval):
    from lm_eval.api.model import TemplateLM

    for template in ("$A", "<s> $A"):
        scorer = tiny_multiple_choice.scorer(
            tokenizer=tiny_multiple_choice.tokenizer(template=template)
        )
        ours = harness.model(scorer)
        for context, continuation in [("the cat sat ", "on"), ("the cat", " sat"), ("a\n", "b")]:
            theirs = TemplateLM._encode_pair(ours, context, continuation)
            assert ours._encode_pair(context, continuation) == theirs


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
def test_the_harness_and_we_share_a_cache(tmp_path):
    scorer = tiny_multiple_choice.scorer()
    with open_cache(tmp_path, model="0" * 64, settings={}) as cache:
        kept = dataclasses.replace(scorer, cache=cache)
        ours = compare({"dense": kept}, {"made": QUESTIONS})["tasks"]["made"]["metrics"]
        silent = dataclasses.replace(kept, logits=lambda _: pytest.fail("the model was asked"))
        result = harness.evaluate(silent, {"made": QUESTIONS})["made"]
    assert result["acc"] == pytest.approx(ours["acc"]["accuracy"]["dense"]["estimate"])


@pytest.mark.slow
@pytest.mark.parametrize("words", [3, 60])
def test_a_text_is_scored_in_disjoint_windows(lm_eval, words):
    """Against a pass for each token: after the prefix token, or the 64 tokens before it."""
    scorer = tiny_multiple_choice.scorer()
    text = " ".join(itertools.islice(itertools.cycle(tiny_multiple_choice.TEXT.split()), words))
    ids = np.array([scorer.tokenizer.bos_id, *encode(scorer.tokenizer, text, begin=False)])
    expected = 0.0
    for end in range(1, len(ids)):
        # The window that scores this token ends at a multiple of 64, or with the text.
        last = min(-(-end // 64) * 64, len(ids) - 1)
        first = max(0, last - 64)
        logits = np.asarray(scorer.logits(padded(ids[first:end])))[0, end - first - 1]
        expected += logits[ids[end]] - np.logaddexp.reduce(logits.astype(np.float64))
    assert (len(ids) > 65) == (words == 60)
    empty, result = harness.model(scorer).loglikelihood_rolling(
        [request("loglikelihood_rolling", ""), request("loglikelihood_rolling", text)]
    )
    assert empty == 0.0 and result == pytest.approx(expected, rel=1e-5)


def padded(ids):
    """A row of the lengths that `Scorer.logits` takes."""
    return np.pad(ids, (0, -len(ids) % 32))[None].astype(np.int32)


def request(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
def test_generated_text_is_greedy_and_ends_where_the_task_says():
    scorer = tiny_multiple_choice.scorer(batch_tokens=64)
    (params,) = scorer.logits.args
    cfg = tiny.decoder(vocab_size=params["embed"]["tokens"].shape[0])

    def generate(prompts, most):
        assert len(prompts) == 1 or max(map(len, prompts)) + most <= 32
        return lm_jax.generate(params, prompts, cfg, max_new_tokens=most)

    def greedy(context, most):
        ids = encode(scorer.tokenizer, context)[most - 64 :]
        for _ in range(most):
            ids.append(
                int(np.asarray(scorer.logits(padded(np.array(ids))))[0, len(ids) - 1].argmax())
            )
        return scorer.tokenizer.decode(ids[-most:])

    model = harness.model(scorer, generate)
    contexts = ["the cat", "a bird sang a song", "", tiny_multiple_choice.TEXT * 3]
    asked = [(contexts[0], 6), (contexts[1], 6), (contexts[3], 12), (contexts[0], 12)]
    whole = [greedy(*each) for each in asked]
    end = whole[3][2:5]
    options = [{"max_gen_toks": most, "until": []} for _, most in asked]
    options[3]["until"] = ["no such end", end]
    got = model.generate_until(
        [request("generate_until", text, o) for (text, _), o in zip(asked, options, strict=True)]
    )
    assert got == [*whole[:3], whole[3][: whole[3].index(end)]]
    with pytest.raises(UsageError, match="do_sample=False"):
        model.generate_until([request("generate_until", "a", {"do_sample": True})])
    with pytest.raises(UsageError, match="max_gen_toks = 256 leaves no place"):
        model.generate_until([request("generate_until", "a", {})])


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
def test_what_cannot_be_is_refused():
    model = harness.model(tiny_multiple_choice.scorer())
    with pytest.raises(UsageError, match=r"give harness\.model a generate"):
        model.generate_until([])
    with pytest.raises(UsageError, match="made has no questions"):
        harness.evaluate(tiny_multiple_choice.scorer(), {"made": []})


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("arc/arc_easy.yaml", "question"),
        ("piqa/piqa.yaml", "goal"),
        ("openbookqa/openbookqa.yaml", "question_stem"),
    ],
)
def test_prompts_splits_and_metrics_are_those_of_the_harness(file, field):
    path = importlib.resources.files("lm_eval") / "tasks" / file
    theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    ours, prompt = TASKS[theirs["task"]], theirs["doc_to_text"]
    # Their prompt is the name of a field, or a template.
    prompt_text = "Why?" if prompt == field else jinja2.Template(prompt).render({field: "Why?"})
    assert prompt_text == "Why?".join(ours.prompt)
    assert next(iter(ours.splits)) == (theirs["test_split"] or theirs["validation_split"])
    assert tuple(metric["metric"] for metric in theirs["metric_list"]) == METRICS
    assert theirs.get("target_delimiter", " ") == DELIMITER


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
def test_the_preset_of_truthfulqa_is_six_answered_questions():
    turns = [turn.splitlines() for turn in harness.truthfulqa_preset().split("\n\n")]
    assert len(turns) == 6
    assert all(q.startswith("Q: ") and a.startswith("A: ") for q, a in turns)


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(harness.model, None),
        functools.partial(harness.evaluate, None, {"made": QUESTIONS}),
        harness.truthfulqa_preset,
    ],
)
def test_without_the_harness_the_command_is_named(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'interpretable-attention-jax\[eval\]'"):
        call()
