"""The settings of the addition study, as the frozen dataclass that its config file becomes."""

import dataclasses
import math
from typing import Any, Literal

from ml_collections import ConfigDict

from lm_jax.errors import UsageError
from lm_jax.run.config_files import in_mode
from lm_jax.train.config import TrainConfig
from sparse_jax.addition import problems
from sparse_jax.geco import GecoConfig


@dataclasses.dataclass(frozen=True)
class AdditionConfig:
    """Everything that decides the result.

    The paper gives four layers, one head, 13 symbols and a fixed strength, and nothing else.

    Attributes:
      num_layers: of both models, each with one head as wide as the model.
      hidden_size, mlp_size: their widths.
      held_out: sums that are not trained on.
      drawn: sums whose graphs are drawn; they are held out.
      batch_size: sums of one update; with 64 in place of 256 the dense model did not learn the ones
        of the answer in two of five seeds.
      dense_steps, sparse_steps: updates of each model.
      begin: what the sparse model begins as: "dense", the trained dense one, or "drawn", weights
        of its own. From drawn weights the penalty either closes what is not yet needed before the
        sums are learned, or is too weak to close much.
      dense_rate, sparse_rate: learning rates at the peak; 2 % of the steps warm up, then a cosine
        to a tenth.
      dense_decay, sparse_decay: weight decay of matrices; much of it pulls scores to 0, where a
        gate with a bias is open.
      clip_norm: longest gradient.
      strength: what the expected share of open edges, summed over layers, is multiplied by.
      bias: of the gate logits: above 0, gates begin open.
      eval_every: steps between evaluations.
      seeds: one study for each, which draws the split, the weights, the order and the gates.
      allow_fallback: where the newest checkpoint is damaged, continue from the one before it.
    """

    num_layers: int = 4
    hidden_size: int = 64
    mlp_size: int = 128
    held_out: int = 2000
    drawn: tuple[str, ...] = ("53+21", "36+28", "43+59")
    batch_size: int = 256
    dense_steps: int = 1500
    sparse_steps: int = 2000
    begin: Literal["dense", "drawn"] = "dense"
    dense_rate: float = 3e-3
    sparse_rate: float = 1e-3
    dense_decay: float = 0.01
    sparse_decay: float = 1e-3
    clip_norm: float = 1.0
    strength: float = 0.03
    bias: float = 3.0
    eval_every: int = 100
    seeds: tuple[int, ...] = (0,)
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        for text in self.drawn:
            problems.number(text)
        counts = "hidden_size mlp_size batch_size dense_steps sparse_steps eval_every"
        positive = "dense_rate sparse_rate clip_norm strength"
        wanted = {
            "num_layers": (self.num_layers >= 2, "at least 2: carries come second"),
            **{name: (getattr(self, name) >= 1, "at least 1") for name in counts.split()},
            **{name: (0 < getattr(self, name) < math.inf, "above 0") for name in positive.split()},
            **{
                name: (0 <= getattr(self, name) < math.inf, "at least 0")
                for name in ("dense_decay", "sparse_decay")
            },
            "held_out": (
                max(1, len(self.drawn)) <= self.held_out < problems.COUNT,
                f"at least 1, no less than the sums that are drawn, and below {problems.COUNT}",
            ),
            "bias": (math.isfinite(self.bias), "finite"),
            "seeds": (
                bool(self.seeds)
                and len(set(self.seeds)) == len(self.seeds)
                and all(0 <= seed < 2**32 for seed in self.seeds),
                "different numbers in 0..2^32 - 1, one or more",
            ),
        }
        results = [
            f"config.{name} = {getattr(self, name)} must be {what}"
            for name, (holds, what) in wanted.items()
            if not holds
        ]
        if results:
            raise UsageError("; ".join(results))

    @property
    def dual(self) -> GecoConfig:
        """The strength, which stays what it is."""
        return GecoConfig.fixed(self.strength)

    def training(self, steps: int, learning_rate: float, weight_decay: float) -> TrainConfig:
        """The training of one of the two models."""
        return TrainConfig(
            steps=steps,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            clip_norm=self.clip_norm,
            eval_every=self.eval_every,
            early_stop=False,
        )


def experiment(mode: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of the study.

    Args:
      mode: "" for the study; "smoke" for a run of seconds that only shows that it works.
      **settings: fields of `AdditionConfig` that differ from its defaults.

    Raises:
      UsageError: for an unknown mode, or settings that `AdditionConfig` refuses.
    """
    return in_mode(mode, AdditionConfig(**settings), {"smoke": smoke}, of="the addition study")


def smoke(config: AdditionConfig) -> AdditionConfig:
    """The same study so small that it takes seconds."""
    return dataclasses.replace(
        config,
        hidden_size=16,
        mlp_size=32,
        held_out=60,
        batch_size=16,
        dense_steps=6,
        sparse_steps=6,
        eval_every=3,
    )
