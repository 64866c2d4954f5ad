"""Runs of the tiny training, and what they wrote."""

import pyarrow.parquet as pq

from lm_jax.train import loop
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.metrics import EVALUATIONS, METRICS, TIMING
from tests.lm_jax.train import tiny_training as tiny

UPKEEP = CheckpointPolicy(log_every=3, save_every=4)


class Killed(BaseException):
    """Simulates the end of the process: nothing on the way may catch it."""


def kill_at(step):
    def on_step(now):
        if now == step:
            raise Killed

    return on_step


def train(
    folder,
    *,
    objective=tiny.OBJECTIVE,
    config=tiny.CONFIG,
    batches=tiny.BATCHES,
    policy=UPKEEP,
    **options,
):
    arguments = {
        "validation": tiny.VALIDATION,
        "seed": tiny.SEED,
        "mesh": tiny.mesh(4),
        "params": tiny.initial_params(),
    } | options
    return loop.train(folder, objective, config, batches, policy=policy, **arguments)


def metrics(folder):
    table = pq.read_table(folder / METRICS)
    return {name: table[name].to_pylist() for name in table.column_names if name not in TIMING}


def evaluations(folder):
    return pq.read_table(folder / EVALUATIONS).to_pylist()
