"""Task scores of the pair against the metric of the circuit study, and what is left out."""

import json

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import StoppedError
from lm_jax.run import processes, stop
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import make_task
from sparse_jax.studies.pair import task_scores
from sparse_jax.studies.pair.corpus import read_prompts
from sparse_jax.studies.pair.results import ScoredModel
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

CONTEXT = 32


def tasks_of(folder, lines=(), names=("ioi", "greater_than"), prompts=12):
    file = folder / "pretrain.jsonl"
    rows = [{"text": "an article"}, {"text": "\n".join(lines), "task": "ioi", "prompts": lines}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    known = read_prompts([file])
    return task_scores.make_tasks(names, word_tokenizer(), known, prompts=prompts, context=CONTEXT)


def test_a_stop_that_another_process_heard_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "share_stop", lambda: stop.request() or True)
    with stop.signals_as_requests(), pytest.raises(StoppedError, match="before the tasks of"):
        task_scores.score(tmp_path, [ScoredModel("dense", "model")], [], context=CONTEXT)


def test_a_score_is_that_of_the_circuit_study(tmp_path):
    """Prompts are padded to another length here, which moves the metric by rounding alone."""
    model = circuit_model(max_length=CONTEXT)
    folder = tmp_path / "model"
    lm_jax.save_pretrained(folder, model.cfg, model.params, word_tokenizer())
    tasks, unscored = tasks_of(tmp_path)
    assert not unscored
    named = ScoredModel("dense", "model")
    scores = task_scores.score(tmp_path, [named], tasks, context=CONTEXT)
    assert [each.task for each in scores] == ["ioi", "greater_than"]
    saved = CircuitModel.of(lm_jax.load_pretrained(folder))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype("float64"), saved.params)
        for each, task in zip(scores, tasks, strict=True):
            assert each.model == named
            batch = Batch.of(task)
            wide = CircuitModel(exact, saved.cfg)
            clean_B, corrupt_B = (
                np.asarray(metric(wide, batch, tokens))
                for tokens in (batch.clean_BT, batch.corrupt_BT)
            )
            assert each.accuracy.estimate == (clean_B > 0).mean()
            assert each.accuracy.n == 12
            assert each.change.estimate == pytest.approx((clean_B - corrupt_B).mean(), rel=1e-4)


def test_prompts_of_the_training_text_are_left_out(tmp_path):
    task = make_task("ioi", word_tokenizer(), count=12, seed=task_scores._SEED)
    known = [each.clean + each.answers[0] for each in task.examples[:5]]
    (unseen,), _ = tasks_of(tmp_path, known, names=("ioi",))
    assert unseen.examples[:7] == task.examples[5:] and len(unseen.examples) == 12
    assert unseen.manifest.dropped["in the training text"] >= 5


def test_a_task_that_cannot_be_scored_is_named_with_the_reason(tmp_path):
    # As many as are drawn for three.
    task = make_task("ioi", word_tokenizer(), count=60, seed=task_scores._SEED)
    known = [each.clean + each.answers[0] for each in task.examples]
    tasks, (memorised,) = tasks_of(tmp_path, known, names=("ioi",), prompts=3)
    assert not tasks
    assert memorised.task == "ioi"
    assert "0 of 3 examples fit (60 x in the training text)" in memorised.reason
    _, (long,) = task_scores.make_tasks(("ioi",), word_tokenizer(), set(), prompts=3, context=4)
    assert "0 of 3 examples fit (60 x it is longer than" in long.reason
