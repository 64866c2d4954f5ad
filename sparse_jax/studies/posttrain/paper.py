"""Published numbers of "Sparse Attention Post-Training for Mechanistic Interpretability"."""

import dataclasses

from lm_jax.assets import papers


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A row of Table 1: losses in nats per token, and the share of open edges.

    Attributes:
      model: name of the model, with its context in tokens and its training text.
    """

    model: str
    dense_loss: float
    sparse_loss: float
    edges: float


@dataclasses.dataclass(frozen=True)
class _Numbers:
    post_training: tuple[PublishedModel, ...]


TABLE_1 = papers.numbers("sparse", _Numbers).post_training
