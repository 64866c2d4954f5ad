"""A run ends early at a plateau, or where the loss of an evaluation rises."""

import dataclasses
import itertools

import numpy as np

from lm_jax.checkpoint import manager
from lm_jax.train import loop
from lm_jax.train.config import Plateau, TrainConfig
from tests.lm_jax.train import tiny_training as tiny
from tests.lm_jax.train.tiny_run import evaluations, train


def test_a_plateau_is_evaluations_in_a_row_without_the_gain():
    config = TrainConfig(
        steps=100, learning_rate=1e-3, early_stop=False, plateau=Plateau(min_gain=0.1, patience=2)
    )
    history, ended = loop.EvalHistory(), []
    # 4.95 gains too little; 4.8 gains enough over 4.95, the best before it; then 4.85, 4.75 do not.
    for step, loss in enumerate([5.0, 4.95, 4.8, 4.85, 4.75]):
        history = history.with_loss(loss, step, config)
        ended.append(history.stopped_early)
    assert ended == [False, False, False, False, True]
    assert (history.best, history.best_step) == (4.75, 4)


def test_it_stops_at_a_plateau_and_stays_stopped(tmp_path):
    # No evaluation gains as much as this.
    plateau = Plateau(min_gain=50.0, patience=3)
    config = dataclasses.replace(tiny.CONFIG, eval_every=2, plateau=plateau, schedule="constant")
    done = train(tmp_path / "run", config=config, validation=tiny.FakeBatches(per_epoch=2))
    # The first evaluation is not compared with any.
    assert done.history.stopped_early and int(done.state.step) == 8
    again = train(tmp_path / "run", config=config, validation=tiny.FakeBatches(per_epoch=2))
    tiny.assert_bitwise(again.state, done.state)


def test_it_stops_at_the_first_evaluation_that_rises(tmp_path):
    class Unlike(tiny.FakeBatches):
        """Counts down, which a model that learns to count up fits worse and worse."""

        def at(self, k):
            batch = super().at(k)
            tokens_BS = np.where(batch["tokens"] > 0, 32 - batch["tokens"], 0)
            return batch | {"tokens": tokens_BS.astype(np.int32)}

    config = dataclasses.replace(tiny.CONFIG, eval_every=4, early_stop=True, steps=60)
    config = dataclasses.replace(config, learning_rate=1e-2)
    validation = Unlike(per_epoch=2)
    train_result = train(tmp_path / "run", config=config, validation=validation)
    results = [
        row["value"] for row in evaluations(tmp_path / "run") if row["name"].endswith("/perplexity")
    ]
    assert train_result.history.stopped_early
    assert int(train_result.state.step) == 4 * len(results) < 60
    assert results[-1] > results[-2]
    assert all(later <= earlier for earlier, later in itertools.pairwise(results[:-1]))
    assert train_result.history.best_step in manager.saved_steps(train_result.checkpoints)
    # Started again, it stays stopped.
    again = train(tmp_path / "run", config=config, validation=validation)
    tiny.assert_bitwise(again.state, train_result.state)


def test_a_criterion_decides_what_is_best_and_when_to_stop(tmp_path):
    """With the loss turned round, the first evaluation of a run that improves stays the best."""
    plateau = Plateau(min_gain=0.0, patience=2)
    config = dataclasses.replace(tiny.CONFIG, eval_every=2, plateau=plateau, schedule="constant")
    plain = train(tmp_path / "plain", config=config)
    turned = train(tmp_path / "turned", config=config, criterion=lambda result: -result.loss)
    losses = [
        row["value"]
        for row in evaluations(tmp_path / "plain")
        if row["name"] == "validation/perplexity"
    ]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert (plain.history.best_step, int(plain.state.step)) == (12, 12)
    assert (turned.history.best_step, int(turned.state.step)) == (2, 6)
    assert turned.history.stopped_early and 2 in manager.saved_steps(turned.checkpoints)
