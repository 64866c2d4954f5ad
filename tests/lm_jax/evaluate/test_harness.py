"""The lm-evaluation-harness over our scoring returns our accuracies."""

import dataclasses
import functools
import importlib.resources
import importlib.util

import jinja2
import pytest
import yaml

from lm_jax.errors import UsageError
from lm_jax.evaluate import harness
from lm_jax.evaluate.multiple_choice import TASKS, compare, open_cache
from lm_jax.evaluate.multiple_choice.comparison import DELIMITER, METRICS
from tests.lm_jax.evaluate import tiny_multiple_choice
from tests.lm_jax.evaluate.tiny_multiple_choice import QUESTIONS


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
@pytest.mark.usefixtures("lm_eval")
def test_what_is_no_multiple_choice_is_refused():
    model = harness.model(tiny_multiple_choice.scorer())
    with pytest.raises(UsageError, match=r"lm_jax\.generate"):
        model.generate_until([])
    with pytest.raises(UsageError, match=r"lm_jax\.train\.evaluate"):
        model.loglikelihood_rolling([])
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
