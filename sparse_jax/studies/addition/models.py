"""The dense and the sparse model of the study, and their training.

Both are the same small decoder: Llama blocks (RMS norm, gated MLP) with learned positions and
biases on queries, keys and values. The last digit is a sum modulo ten, which the products of a
gated MLP seem to help with; no ablation tested that. Positions are learned, because "the tens of
the second number" is an absolute position and not a distance.

The answer is written from its highest digit down, so that with causal attention no digit can attend
to a lower one, and a carry must be read from earlier positions. With bidirectional attention
(`config.attention`) the tens can read what the position of the ones has computed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.parallel import sharding
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.loop import Hooks, Measure, TrainResult, TrainRun, train
from lm_jax.train.objective import LanguageModelling, Objective
from sparse_jax.gates.objective import WEIGHTS, Sparsifying
from sparse_jax.studies.addition import problems
from sparse_jax.studies.addition.attention_trace import Tracer, make_tracer
from sparse_jax.studies.addition.results import DENSE, SPARSE
from sparse_jax.studies.addition.settings import AdditionConfig

EXACT = "validation/exact_sums"
OPEN = "validation/open_edges"


class Task(NamedTuple):
    """One of the two models: its objective, its training and its tracer."""

    name: str
    objective: Objective
    training: TrainConfig
    trace: Tracer

    def weights(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Weights of the decoder, from the trained parameters."""
        return params[WEIGHTS] if self.name == SPARSE else params

    def params(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parameters to train, from the weights of a decoder."""
        return {WEIGHTS: weights} if self.name == SPARSE else weights


def decoder(config: AdditionConfig) -> DecoderConfig:
    """Config of both models."""
    return DecoderConfig(
        num_layers=config.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=config.hidden_size,
        hidden_size=config.hidden_size,
        mlp_size=config.mlp_size,
        vocab_size=problems.VOCAB_SIZE,
        max_length=problems.READ,
        qkv_bias=True,
        rope=None,
    )


def tasks(config: AdditionConfig) -> tuple[Task, Task]:
    """The dense model and the sparse one."""
    cfg = decoder(config)
    dense = LanguageModelling(cfg, config.mixer, make_batch=problems.answer_batch)
    sparse = Sparsifying(
        cfg,
        dual=config.dual,
        bias=config.bias,
        distill=0.0,
        make_batch=problems.answer_batch,
        mixer=config.mixer,
    )
    densely = config.training(config.dense_steps, config.dense_rate, config.dense_decay)
    sparsely = config.training(config.sparse_steps, config.sparse_rate, config.sparse_decay)
    return (
        Task(DENSE, dense, densely, make_tracer(cfg, config.mixer)),
        Task(SPARSE, sparse, sparsely, make_tracer(cfg, config.mixer, bias=config.bias)),
    )


def train_model(
    task: Task,
    config: AdditionConfig,
    folder: Path,
    train_P: np.ndarray,
    held_out_P: np.ndarray,
    mesh: Mesh,
    *,
    seed: int,
    begin: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Trains one model in its own folder, or resumes its training.

    Args:
      task: the model.
      config: settings of the study.
      folder: folder of the model, created if need be.
      train_P: problems to train on.
      held_out_P: problems to evaluate on.
      mesh: the devices.
      seed: seed of the initial weights, the order of the problems and the gate noise.
      begin: initial weights of the decoder; None initialises them at random.

    Raises:
      As `lm_jax.train.loop.train`.
    """
    return train(
        folder,
        TrainRun(
            objective=task.objective,
            config=task.training,
            batches=problems.Batches(train_P, batch_size=config.batch_size, seed=seed),
            validation=problems.OnePass(held_out_P, batch_size=_divisible(len(held_out_P), mesh)),
            seed=seed,
            params=None if begin is None else task.params(begin),
        ),
        mesh,
        CheckpointPolicy(allow_fallback=config.allow_fallback),
        Hooks(measure=_measure(task, held_out_P)),
    )


def _divisible(count: int, mesh: Mesh) -> int:
    """Smallest batch size of at least `count` that the data axes of the mesh divide."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-count // ways) * ways


def _measure(task: Task, held_out_P: np.ndarray) -> Measure:
    tokens_PS = problems.rows(held_out_P)

    def measure(params: Mapping[str, Any], step: int, result: object) -> dict[str, float]:
        del step, result
        trace = task.trace(task.weights(sharding.fetch(params)), tokens_PS)
        return {EXACT: float(trace.exact_P.mean()), OPEN: float(trace.edges_LP.sum(0).mean())}

    return measure
