"""Published numbers of "Sparse Attention Post-Training for Mechanistic Interpretability"."""

import dataclasses


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


TABLE_1 = (
    PublishedModel("GPT-2, context 64, OpenWebText", 3.48, 3.501, 0.0022),
    PublishedModel("OLMo-7B, context 512, Dolma", 2.24, 2.287, 0.0044),
)
