"""Runs the recall suite: trains every model on every task, and measures it in every condition.

Besides what every study has, the work folder holds

    runs/<model>-<task>-<rate>-seed<n>/    checkpoints and metrics.parquet (`lm_jax.train.loop`)
    rows.parquet                           a row per run, condition and sequence (`results.ROWS`)

A run that was killed resumes from its last checkpoint; a run that was measured is not run again.
One that diverges has no rows but the reason in `divergence.json` of its folder, and the suite
continues.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_jax.errors import DivergedError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import count_params, forward
from lm_jax.model.mixers import Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.run.files import write_json
from lm_jax.run.finished import Inputs
from lm_jax.run.results import load_result
from lm_jax.run.stop import check as check_stop
from lm_jax.study import Work
from lm_jax.train.loop import TrainRun, train
from lm_jax.train.objective import PAD, LanguageModelling
from protot_jax.analysis.equal_memory import state_size
from protot_jax.analysis.recall import Batches, Condition, Split, Task, answer_batch, rows
from protot_jax.studies.recall import numbers
from protot_jax.studies.recall.results import ROWS, DivergedTraining, ModelSize, RecallSummary
from protot_jax.studies.recall.settings import RecallConfig
from protot_jax.training import diverged, pretrain
from protot_jax.training.diverged import DIVERGED

RUNS = "runs"

Predict = Callable[[np.ndarray], np.ndarray]


class Run(NamedTuple):
    """One training: a model, a task, a peak learning rate and a seed."""

    model: str
    task: Task
    learning_rate: float
    seed: int

    @property
    def unit(self) -> tuple[str | int, ...]:
        """The id of the training in the store of rows."""
        return (self.model, self.task, f"{self.learning_rate:g}", self.seed)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.model}-{self.task}-{self.learning_rate:g}-seed{self.seed}"


def plan(config: RecallConfig) -> Iterator[Run]:
    """All runs; those of one model follow one another, because they share a compiled program."""
    for model in config.models:
        for task in config.task_names:
            for rate in config.learning_rates:
                for seed in config.seeds:
                    yield Run(model, task, rate, seed)


def inputs(config: RecallConfig) -> Inputs:
    """The digest of all measured sequences."""
    digest = hashlib.sha256()
    for task in config.task_names:
        for condition in config.measured(task):
            tokens_PS = rows(condition, config.sequences, config.vocab_size, "test")
            digest.update(tokens_PS.astype("<i4").tobytes())
    return {"measured sequences": digest.hexdigest()}


def measure(config: RecallConfig, work: Work) -> RecallSummary:
    """Trains and measures every run that has no rows yet."""
    runs = list(plan(config))
    table = work.units(
        "rows",
        ROWS,
        {each.unit: each for each in runs},
        functools.partial(_rows, config, work.path),
    )
    return numbers.summarise(
        config,
        table,
        sizes=tuple(model_size(name, *config.model(name)) for name in config.models),
        device=jax.devices()[0].device_kind,
        diverged=[
            load_result(marker, DivergedTraining)
            for each in runs
            if (marker := work.path / RUNS / each.name / DIVERGED).is_file()
        ],
    )


def _rows(config: RecallConfig, folder: Path, one: Run) -> dict[str, list[Any]]:
    """The rows of a run; none if it diverges, which its folder then tells."""
    place = folder / RUNS / one.name
    (place / DIVERGED).unlink(missing_ok=True)
    try:
        return run_one(config, one, folder)
    except DivergedError as error:
        reason = diverged.reason(error, place)
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / DIVERGED, DivergedTraining(*one, reason))
        print(f"{one.name} diverged: {reason}", flush=True)
        return {name: [] for name in ROWS.names}


def run_one(config: RecallConfig, one: Run, folder: Path) -> dict[str, list[Any]]:
    """Trains a model, or resumes its training, and measures it: columns of `ROWS`."""
    cfg, mixer = config.model(one.model)
    parent = folder / RUNS
    parent.mkdir(exist_ok=True)
    trained = train(
        parent / one.name,
        TrainRun(
            objective=LanguageModelling(cfg, mixer, make_batch=answer_batch),
            config=config.training(one.learning_rate),
            batches=Batches(
                config.trained(one.task),
                batch_size=config.batch_size,
                vocab_size=config.vocab_size,
                seed=one.seed,
            ),
            seed=one.seed,
            decays=pretrain.decays,
        ),
        sharding.make_mesh(data=-1),
    )
    params = sharding.fetch(trained.state.params)
    predict = functools.partial(_predict(cfg, mixer), params)
    columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}
    splits: tuple[tuple[Split, Sequence[Condition]], ...] = (
        ("choice", config.trained(one.task)),
        ("test", config.measured(one.task)),
    )
    for split, conditions in splits:
        for condition in conditions:
            check_stop(f"before {condition.task} of length {condition.length}")
            tokens_PS = rows(condition, config.sequences, config.vocab_size, split)
            right_P, asked_P = answered(predict, tokens_PS, config.batch_size)
            found = one._asdict() | condition._asdict() | {"split": split}
            for name, value in found.items():
                columns[name] += [value] * len(tokens_PS)
            columns["sequence"] += range(len(tokens_PS))
            columns["right"] += right_P.tolist()
            columns["asked"] += asked_P.tolist()
    return columns


def answered(
    predict: Predict, tokens_PS: np.ndarray, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Right answers and queries of each sequence, int `[P]`.

    Args:
      predict: ids `[B, T]` to the predicted next ids `[B, T]`.
      tokens_PS: rows of `sequences.rows`.
      batch_size: B, at most.
    """
    T = tokens_PS.shape[1] // 2
    predicted_PT = np.concatenate(
        [
            predict(tokens_PS[start : start + batch_size, :T])
            for start in range(0, len(tokens_PS), batch_size)
        ]
    )
    asked_PT = tokens_PS[:, T:] != PAD
    return (asked_PT & (predicted_PT == tokens_PS[:, T:])).sum(1), asked_PT.sum(1)


@functools.lru_cache(maxsize=8)
def _predict(cfg: DecoderConfig, mixer: Mixer) -> Callable[[Any, np.ndarray], np.ndarray]:
    def predict(params: Any, tokens_BT: jax.Array) -> jax.Array:
        return forward(params, tokens_BT, cfg, mixer=mixer).logits.argmax(-1)

    compiled = exact_jit(predict)
    return lambda params, tokens_BT: np.asarray(compiled(params, tokens_BT))


def model_size(name: str, cfg: DecoderConfig, mixer: Mixer) -> ModelSize:
    """The state of a layer of a model, and its parameters."""
    size = state_size(cfg, mixer)
    return ModelSize(
        model=name,
        memory=size.memory if mixer.recurrent else None,
        memory_per_token=0 if mixer.recurrent else size.memory,
        other=size.other,
        parameters=count_params(cfg, mixer=mixer),
    )
