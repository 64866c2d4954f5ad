"""Pretraining one seed: the objective, the optimizer's groups, and perplexities of its weights.

`protot_jax.studies.pretraining` is the command, which trains the seeds of a run.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.checkpoint import manager
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.parallel import sharding
from lm_jax.text.examples import Batches, OnePass
from lm_jax.train import optim
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.loop import Hooks, TrainRun, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, is_cast
from lm_jax.train.step import make_eval_step
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.training.config import PretrainConfig
from protot_jax.training.results import CheckpointPerplexity, SeedSummary
from protot_jax.training.router import router_statistics
from protot_jax.training.routing_loss import RoutedLanguageModelling, adds_routing_loss
from protot_jax.training.saved_run import Data, batch_maker, model

# Matrices without weight decay: prototypes, and Mamba's rates and projection of step sizes.
_NOT_DECAYED = ("/prototypes", "/A_log", "/step_up")
# Mamba's rates and step sizes pass through exponentials.
_NOT_CAST = ("/A_log", "/step_bias")


def decays(path: str, spec: ParamSpec) -> bool:
    """Whether a parameter has weight decay: matrices do, except three, as in the released code."""
    return optim.is_weight(path, spec) and not path.endswith(_NOT_DECAYED)


def casts(path: str, spec: ParamSpec) -> bool:
    """Whether a parameter is cast to the run's computation dtype."""
    return is_cast(path, spec) and not path.endswith(_NOT_CAST)


def train_seed(config: PretrainConfig, data: Data, folder: Path, seed: int) -> SeedSummary:
    """Trains one seed to its end and evaluates its best and its last weights."""
    cfg, mixer = model(config, data.prepared.manifest["vocab_size"])
    mesh = sharding.make_mesh(*config.mesh)
    share = sharding.own_block(mesh, config.batch_size)
    batches = Batches(data.train, seed=seed, **share)
    validation = OnePass(data.validation, **share)
    make_batch = batch_maker(config, data.prepared.tokenizer)
    kind = RoutedLanguageModelling if adds_routing_loss(mixer) else LanguageModelling
    objective = kind(
        cfg,
        mixer,
        dtype=config.dtype,
        dropout=config.dropout,
        casts=casts,
        make_batch=make_batch,
    )
    result = train(
        folder,
        TrainRun(
            objective=objective,
            config=config.training(batches.per_epoch),
            batches=batches,
            validation=validation,
            seed=seed,
            decays=decays,
            group=optim.group,
        ),
        mesh,
        CheckpointPolicy(allow_fallback=config.allow_fallback),
        Hooks(
            measure=router_statistics(cfg, mixer, validation, mesh, make_batch)
            if isinstance(mixer, PrototypeMixer)
            else None
        ),
    )
    splits = {"validation": validation, "test": OnePass(data.test, **share)}
    eval_step = make_eval_step(objective, mesh)

    def perplexities(params: ParamTree) -> dict[str, Evaluation]:
        return {name: evaluate(eval_step, params, split, mesh) for name, split in splits.items()}

    last_step, best_step = int(result.state.step), result.history.best_step
    last = best = perplexities(result.state.params)
    if best_step is not None and best_step != last_step:
        wanted = sharding.abstract(objective.spec, mesh=mesh)
        best = perplexities(manager.load_params(result.checkpoints, best_step, wanted))
    return SeedSummary(
        seed=seed,
        steps=last_step,
        tokens_seen=int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py()),
        validation_tokens=last["validation"].tokens,
        test_tokens=last["test"].tokens,
        best=_perplexities(best_step or last_step, best),
        last=_perplexities(last_step, last),
    )


def _perplexities(step: int, result: Mapping[str, Evaluation]) -> CheckpointPerplexity:
    return CheckpointPerplexity(step, result["validation"].perplexity, result["test"].perplexity)
