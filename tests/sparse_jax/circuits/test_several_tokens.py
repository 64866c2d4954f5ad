"""Continuations of several tokens: log-probabilities of the whole, against runs of each alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits import metrics
from sparse_jax.circuits.runs import Batch, measure
from sparse_jax.circuits.tasks import load_task
from tests import rounding
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

PROMPT = "{} and {} went to the park. {} gave a ball to"
ROWS = [
    # Two right ones that end apart, a wrong one that leaves at once and one that leaves later.
    ([" Mary Anna Tom", " Mary John"], [" Alice Robert", " Mary Anna Peter", " James"]),
    ([" Tom"], [" Laura", " Emily"]),
    ([" Anna Paul"], [" Anna Kate", " Mark"]),
]


def task_of(folder, tokenizer, rows=ROWS, **options):
    file = folder / "several.jsonl"
    lines = []
    for k, (right, wrong) in enumerate(rows):
        # Prompts of two lengths.
        text = ("Then, " if k == 1 else "") + PROMPT
        lines.append(
            {
                "clean": text.format("Susan", "George", "Susan"),
                "corrupt": text.format("Susan", "George", "Frank"),
                "answers": right,
                "wrong_answers": wrong,
            }
        )
        lines[-1]["clean"] = lines[-1]["clean"].replace("ball", ("ball", "book", "ring")[k])
        lines[-1]["corrupt"] = lines[-1]["corrupt"].replace("ball", ("ball", "book", "ring")[k])
    file.write_text("\n".join(map(json.dumps, lines)))
    return load_task(file, tokenizer, **options)


def parted(ids, longest):
    """A continuation as far as the token with which it leaves the longest right one."""
    at = next((k for k, (a, b) in enumerate(zip(ids, longest, strict=False)) if a != b), None)
    return ids if at is None else ids[: at + 1]


def ids_of(task, tokenizer, b):
    example = task.examples[b]
    right, wrong = (
        [tokenizer.encode(text) for text in texts]
        for texts in (example.answers, example.wrong_answers)
    )
    longest = max(right, key=len)
    return right, [parted(ids, longest) for ids in wrong]


def test_prompts_end_with_the_tokens_before_the_last_one_of_the_right_continuation(tmp_path):
    tokenizer = word_tokenizer()
    task = task_of(tmp_path, tokenizer)
    arrays = task.arrays
    assert task.manifest.metric == "log_probability_difference"
    for b, appended in enumerate((2, 0, 1)):
        example = task.examples[b]
        forced = tokenizer.encode(max(example.answers, key=len))[:appended]
        length = arrays.lengths_B[b]
        for tokens_BT, text in (
            (arrays.clean_BT, example.clean),
            (arrays.corrupt_BT, example.corrupt),
        ):
            assert tokens_BT[b, :length].tolist() == [*tokenizer.encode(text), *forced]
        assert arrays.position_B[b] == length - 1 - appended
    with pytest.raises(UsageError, match="no logit difference; choose log_probability_difference"):
        task_of(tmp_path, tokenizer, metric="logit_difference")
    alone = task_of(tmp_path, tokenizer, ROWS[1:2])
    assert alone.manifest.metric == "logit_difference" and alone.arrays.continuations.path is None


def test_the_metric_is_the_sum_over_all_tokens_of_every_continuation(tmp_path):
    tokenizer = word_tokenizer()
    task = task_of(tmp_path, tokenizer)
    path = task.arrays.continuations.path
    B, K, V = len(ROWS), path.next_BK.shape[1], tokenizer.vocab_size
    logits = np.random.default_rng(0).normal(0, 2, (2 + K, B, V)).astype(np.float32)

    def function(first_BV, second_BV, path_BKV):
        return {
            name: metrics.METRICS[name](first_BV, second_BV, task.arrays.continuations, path_BKV)
            for name in ("probability_difference", "log_probability_difference")
        }

    given = [jnp.asarray(each) for each in (*logits[:2], logits[2:].swapaxes(0, 1))]
    exact = rounding.expected(function, *given)
    rounding.assert_within(jax.device_get(function(*given)), exact)
    weights = np.exp(logits[2:].astype(np.float64))
    p_KBV = weights / weights.sum(-1, keepdims=True)
    for b in range(B):
        right, wrong = (
            sum(np.prod([p_KBV[k, b, i] for k, i in enumerate(ids)]) for ids in side)
            for side in ids_of(task, tokenizer, b)
        )
        got = exact.values
        np.testing.assert_allclose(got["probability_difference"][b], right - wrong, rtol=1e-9)
        np.testing.assert_allclose(
            got["log_probability_difference"][b], np.log(right / wrong), rtol=1e-9
        )


@pytest.mark.parametrize("bias", [None, 0.3])
def test_one_run_has_what_runs_of_every_continuation_have(bias, tmp_path):
    """Dense and with gates, clean and corrupt, and the gradient is finite."""
    tokenizer = word_tokenizer()
    task = task_of(tmp_path, tokenizer)
    batch = Batch.of(task)
    model = circuit_model(bias=bias, vocab_size=tokenizer.vocab_size)

    def log_p(prompt, ids):
        whole = jnp.asarray([[*prompt, *ids]])
        logits = model.forward(whole, jnp.ones(whole.shape, bool)).logits[0].astype(jnp.float32)
        logp_TV = np.asarray(jax.nn.log_softmax(logits), np.float64)
        return sum(logp_TV[len(prompt) - 1 + k, i] for k, i in enumerate(ids))

    for tokens_BT, side in ((batch.clean_BT, "clean"), (batch.corrupt_BT, "corrupt")):
        got_B, _ = measure(model, batch, tokens_BT)
        for b, example in enumerate(task.examples):
            prompt = tokenizer.encode(getattr(example, side))
            right, wrong = (
                np.logaddexp.reduce([log_p(prompt, ids) for ids in each])
                for each in ids_of(task, tokenizer, b)
            )
            # Some 300 roundings of a log-probability of at most 20, in each of a few terms.
            assert abs(float(got_B[b]) - (right - wrong)) < 300 * 2**-24 * 20

    def total(table_VD):
        embed = model.params["embed"] | {"tokens": table_VD}
        moved = model.replace(params=model.params | {"embed": embed})
        return measure(moved, batch, batch.clean_BT)[0].sum()

    gradient_VD = jax.grad(total)(model.params["embed"]["tokens"])
    assert jnp.isfinite(gradient_VD).all() and (gradient_VD != 0).any()
