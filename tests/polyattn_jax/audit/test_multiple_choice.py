"""Multiple choice under recipes: the scores of the audit against another forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import StoppedError, UsageError
from lm_jax.evaluate.multiple_choice import TRUTHFULQA, Scorer, comparison, truthfulqa
from lm_jax.evaluate.multiple_choice.likelihood import pair
from lm_jax.run import processes, stop
from lm_jax.statistics import wilson
from polyattn_jax.audit import multiple_choice, stages
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.recipes.substitute import GlobalRowMap
from tests import rounding
from tests.polyattn_jax.conftest import QUESTIONS as COUNT


def test_an_audit_scores_every_choice_under_every_recipe(asked, questions_file, tiny):
    """Accuracies follow from the scores, and these equal a forward in float64 within rounding."""
    folder, result, out = asked
    audited = AuditedModel(lm_jax.load_pretrained(tiny), None, result.config)
    conditions = stages.sweep_conditions(audited, result.calibration.bias)
    questions, task = truthfulqa(questions_file), result.choices[TRUTHFULQA]
    assert (task.n, task.chance, [*task.metrics]) == (COUNT, 0.5, ["acc", "acc_norm"])
    model, values = audited.model, {}
    for condition in conditions:
        with multiple_choice.open_scores(audited, condition, folder) as cache:
            # A score that is not stored would need the logits.
            scorer = Scorer(None, model.tokenizer, model.cfg.max_length, cache=cache)
            scores = comparison.answers(scorer, questions)
        values[condition.name] = scores.log_likelihoods
        for metric, right in scores.correct.items():
            accuracy = task.metrics[metric].accuracy[condition.name]
            assert accuracy == wilson(int(right.sum()), COUNT)
        if condition.name not in ("softmax", "relu_p4_bauto"):
            continue
        one = pair(model.tokenizer, questions[0].context, f" {questions[0].choices[0]}")
        tokens, scored = jnp.asarray([(*one.context, *one.continuation)]), len(one.continuation)

        def log_likelihood(tokens=tokens, scored=scored, condition=condition):
            attend = GlobalRowMap(condition.recipe.map, condition.bias)
            logits = lm_jax.forward(model.params, tokens[:, :-1], model.cfg, attend=attend).logits
            top = logits.max(-1, keepdims=True)
            total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
            own = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
            return (own - total)[0, -scored:].sum()

        wanted = rounding.expected(log_likelihood)
        rounding.assert_within(np.float32(scores.log_likelihoods[0][0]), wanted, condition.name)
    assert set(values) == {entry.cell for entry in result.sweep}
    assert len(set(values.values())) == len(values)
    assert f"Multiple choice (truthfulqa_mc1: {COUNT} questions)" in out


def test_a_stopped_process_scores_no_further_batch_and_meets_the_others(
    tiny, questions_file, tmp_path, monkeypatch
):
    """The first of two processes, which is asked to stop while it scores its first batch."""
    model, batches, met = lm_jax.load_pretrained(tiny), [], []

    def logits(params, tokens_BT, *, valid_BT, **substitution):
        del params, substitution
        batches.append(tokens_BT)
        # The one row of the longest question, padded to a multiple of 32 tokens.
        length = int(valid_BT.sum())
        assert valid_BT[0, :length].all() and len(valid_BT) == 1
        assert np.asarray(tokens_BT)[0, length - 1] > 0 and not tokens_BT[:, length:].any()
        stop.request()
        return jnp.zeros((*tokens_BT.shape, model.cfg.vocab_size))

    monkeypatch.setattr(multiple_choice.measure, "logits", logits)
    monkeypatch.setattr(multiple_choice, "BATCH_TOKENS", 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "wait_for_all", lambda: met.append("all"))
    monkeypatch.setattr(processes, "share_stop", stop.requested)
    audited = AuditedModel(model, None, AuditConfig(str(tiny)))
    heads = np.ones((model.cfg.num_layers, model.cfg.num_heads), bool)
    softmax = stages.Condition("choices", "softmax", SOFTMAX, 0.0, heads)
    questions = {TRUTHFULQA: truthfulqa(questions_file)}
    with stop.signals_as_requests(), pytest.raises(StoppedError, match="during multiple choice"):
        multiple_choice.evaluate(audited, tmp_path, [softmax], questions)
    assert (len(batches), met) == (1, ["all"])
    # What was scored is kept.
    with multiple_choice.open_scores(audited, softmax, tmp_path) as cache:
        assert cache.count_rows() == len(batches[0])


def test_unknown_and_doubled_tasks_are_refused():
    with pytest.raises(UsageError, match=r"config.choices has 'arc_esy'; did you mean 'arc_easy'"):
        AuditConfig("a", choices=("arc_esy",))
    with pytest.raises(UsageError, match="names a task twice"):
        AuditConfig("a", choices=("piqa", "piqa"))
    with pytest.raises(UsageError, match=r"config\.choices_n = -1 must be at least 0"):
        AuditConfig("a", choices_n=-1)
    assert multiple_choice.read_questions(AuditConfig("a")) == {}
