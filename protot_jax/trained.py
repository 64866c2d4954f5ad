"""A pretraining run as a model to read: its config, parameters and tokenizer."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from lm_jax import launch, runs, sharding
from lm_jax.config import DecoderConfig
from lm_jax.decoder import param_spec
from lm_jax.errors import BadInputError, UsageError
from lm_jax.hf.tokenizer import Tokenizer
from lm_jax.mixers import Mixer
from lm_jax.train import checkpoint, checkpoints
from protot_jax import pretrain
from protot_jax.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What a run left: parameters after `step` updates, and all it takes to use them."""

    cfg: DecoderConfig
    mixer: Mixer
    params: dict[str, Any]
    tokenizer: Tokenizer
    config: PretrainConfig
    seed: int
    step: int


def load_run(
    run: str | os.PathLike[str],
    *,
    seed: int | None = None,
    best: bool = False,
) -> TrainedModel:
    """Loads a model that `protot_jax.pretrain` trained, from its work folder.

    Args:
      run: the work folder.
      seed: which of the run's seeds; None is the first.
      best: the checkpoint with the lowest validation perplexity, in place of the last.

    Raises:
      BadInputError: the folder holds no such run, or no checkpoint yet.
      CorruptError: a checkpoint or the tokenizer's folder is damaged.
      UsageError: a seed that the run does not have.
    """
    folder = Path(run)
    if not (folder / runs.CONFIG).is_file():
        raise BadInputError(f"{folder} is no run: it has no {runs.CONFIG}; name a work folder")
    config = launch.freeze(runs.read_json(folder / runs.CONFIG), PretrainConfig)
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise UsageError(f"seed = {seed} is none of {', '.join(map(str, config.seeds))}")
    saved = pretrain.seed_folder(folder, seed) / checkpoints.FOLDER
    steps = checkpoints.saved_steps(saved)
    if not steps:
        raise BadInputError(f"{saved} holds no checkpoint; start the run again to go on")
    step = steps[-1]
    if best:
        notes = checkpoint.verify(checkpoints.step_folder(saved, step))["notes"]
        step = notes["progress"]["best_step"] or step
    tokenizer = Tokenizer.from_folder(folder / pretrain.DATA)
    cfg, mixer = pretrain.model(config, tokenizer.vocab_size)
    params = checkpoints.load_params(saved, step, sharding.abstract(param_spec(cfg, mixer)))
    return TrainedModel(cfg, mixer, params, tokenizer, config, seed, step)
