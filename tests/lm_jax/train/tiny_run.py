"""Runs of the tiny training, and what they wrote."""

import dataclasses

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


def train(folder, *, mesh=None, policy=UPKEEP, **options):
    """Trains the tiny model; options are fields of `TrainRun` and `Hooks`."""
    names = {field.name for field in dataclasses.fields(loop.Hooks)}
    hooks = {name: options.pop(name) for name in names & options.keys()}
    run = {
        "objective": tiny.OBJECTIVE,
        "config": tiny.CONFIG,
        "batches": tiny.BATCHES,
        "validation": tiny.VALIDATION,
        "seed": tiny.SEED,
        "params": tiny.initial_params(),
    } | options
    return loop.train(
        folder, loop.TrainRun(**run), mesh or tiny.mesh(4), policy, loop.Hooks(**hooks)
    )


def stepwise(train, on_step):
    """A training loop in whose place `on_step` is called after every step too."""

    def stepping(folder, run, mesh, policy=None, hooks=None):
        hooks = dataclasses.replace(hooks or loop.Hooks(), on_step=on_step)
        return train(folder, run, mesh, policy, hooks)

    return stepping


def metrics(folder):
    table = pq.read_table(folder / METRICS)
    return {name: table[name].to_pylist() for name in table.column_names if name not in TIMING}


def evaluations(folder):
    return pq.read_table(folder / EVALUATIONS).to_pylist()
