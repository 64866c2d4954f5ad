"""The models that are timed: a config of all of them, and each one's decoder, mixer and weights."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax

import lm_jax
from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError, nearest
from lm_jax.run.config import from_plain
from protot_jax.training.config import PretrainConfig
from protot_jax.training.count import CountConfig
from protot_jax.training.saved_run import model
from protot_jax.training.study_config import StudyConfig, each_run


@dataclasses.dataclass(frozen=True)
class BenchConfig(PretrainConfig):
    """The config of every model, which may differ in whether the embedding is tied.

    Attributes:
      tied: models whose output projection is the token embedding; None for all models or none, as
        `tie_embeddings` says.
    """

    tied: tuple[str, ...] | None = None

    def with_shapes(self, shapes: CountConfig) -> "BenchConfig":
        """The config with the sizes and the tied models of a table of counts."""
        return dataclasses.replace(
            self,
            hidden_size=shapes.hidden_size,
            num_layers=shapes.num_layers,
            context=shapes.context,
            corpus=dataclasses.replace(self.corpus, vocab_size=shapes.vocab_size),
            tied=shapes.tied,
        )


def of_study(name: str, rows: Sequence[str] | None) -> dict[str, BenchConfig]:
    """The configs of a study's rows, all of them or the named ones in that order.

    Raises:
      UsageError: it has no such config or row.
    """
    study = from_plain(load_config(name), StudyConfig)
    by_name = {variant.name: variant for variant in study.variants}
    for row in rows or ():
        if row not in by_name:
            raise UsageError(f"--rows: {name} has no row {row!r}{nearest(row, list(by_name))}")
    # Runs of a row differ in their learning rate.
    configs = {row: next(each_run(study, by_name[row]))[1] for row in rows or by_name}
    return {row: BenchConfig(**vars(config)) for row, config in configs.items()}


def build(name: str, config: BenchConfig) -> tuple[Any, Any]:
    """The decoder and the mixer of a model at the config's shape."""
    tied = config.tie_embeddings if config.tied is None else name in config.tied
    own = dataclasses.replace(config, model=name, tie_embeddings=tied)
    return model(own, config.corpus.vocab_size)


def random_params(cfg: Any, mixer: Any, dtype: str) -> Any:
    """Random weights of a decoder in `dtype`."""
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    return jax.tree.map(lambda x: x.astype(dtype), params)
