"""Settings of pretraining as a command."""

import dataclasses

from lm_jax.study import Distributed, Training
from protot_jax.training.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class PretrainSettings(PretrainConfig, Training, Distributed):
    """The settings of a run: it trains, and several processes can share it."""
