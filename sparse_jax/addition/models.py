"""The two models of the study, and how they are trained.

Both are one small decoder: the blocks of Llama (RMS norm, gated MLP) with learned positions and
biases on queries, keys and values. The last digit is a sum modulo ten, which the products of a
gated MLP seem to help with; that was not tried by itself. Positions are learned, because "the tens
of the second number" is a place and no distance.

Attention is causal, as everywhere in `lm_jax`. So the digits of the answer, which are written from
the highest down, cannot see the lower ones, and read a carry from places before them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
import numpy as np

from lm_jax.model.config import DecoderConfig
from lm_jax.parallel import sharding
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.loop import Measure, TrainResult, train
from lm_jax.train.objective import LanguageModelling, Objective
from sparse_jax.addition import problems
from sparse_jax.addition.attention_trace import Trace, tracer
from sparse_jax.addition.config import AdditionConfig
from sparse_jax.objective import WEIGHTS, Sparsifying

DENSE, SPARSE = "dense", "sparse"
EXACT = "validation/exact_sums"
OPEN = "validation/open_edges"


class Task(NamedTuple):
    """One of the two models: what it minimises, how it is trained and looked at."""

    name: str
    objective: Objective
    training: TrainConfig
    look: Trace

    def weights(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights of the decoder, of what is trained."""
        return params[WEIGHTS] if self.name == SPARSE else params

    def params(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is trained, of the weights of a decoder."""
        return {WEIGHTS: weights} if self.name == SPARSE else weights


def decoder(config: AdditionConfig) -> DecoderConfig:
    """The shape of both models."""
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
    dense = LanguageModelling(cfg, make_batch=problems.answer_batch)
    sparse = Sparsifying(
        cfg, dual=config.dual, bias=config.bias, distill=0.0, make_batch=problems.answer_batch
    )
    densely = config.training(config.dense_steps, config.dense_rate, config.dense_decay)
    sparsely = config.training(config.sparse_steps, config.sparse_rate, config.sparse_decay)
    return (
        Task(DENSE, dense, densely, tracer(cfg)),
        Task(SPARSE, sparse, sparsely, tracer(cfg, bias=config.bias)),
    )


def train_model(
    task: Task,
    config: AdditionConfig,
    folder: Path,
    trained: np.ndarray,
    held_out: np.ndarray,
    mesh: Mesh,
    *,
    seed: int,
    begin: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Trains, or resumes training, one model in a folder of its own.

    Args:
      task: which of the two.
      config: of the study.
      folder: made if need be.
      trained: the problems to train on.
      held_out: those to evaluate on.
      mesh: the devices.
      seed: draws the weights, the order and the gates.
      begin: the weights of a decoder to begin with; None draws them.

    Raises:
      Whatever `lm_jax.train.loop.train` raises.
    """
    batch_size = config.batch_size
    return train(
        folder,
        task.objective,
        task.training,
        problems.Batches(trained, batch_size=batch_size, seed=seed),
        problems.OnePass(held_out, batch_size=_even(len(held_out), mesh)),
        seed=seed,
        mesh=mesh,
        policy=CheckpointPolicy(allow_fallback=config.allow_fallback),
        params=None if begin is None else task.params(begin),
        measure=_measure(task, held_out),
    )


def _even(count: int, mesh: Mesh) -> int:
    """The smallest batch that holds so many rows and lies evenly on the devices."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-count // ways) * ways


def _measure(task: Task, held_out: np.ndarray) -> Measure:
    tokens_PS = problems.rows(held_out)

    def measure(params: Mapping[str, Any], step: int, result: object) -> dict[str, float]:
        del step, result
        seen = task.look(task.weights(sharding.fetch(params)), tokens_PS)
        return {EXACT: float(seen.exact_P.mean()), OPEN: float(seen.edges_LP.sum(0).mean())}

    return measure
