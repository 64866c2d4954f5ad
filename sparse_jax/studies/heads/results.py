"""Results of `iaj sparse heads`: `summary.json`, and the columns of its table."""

import dataclasses

import pyarrow as pa

from lm_jax.inspect.head_measures import MEASURES
from lm_jax.run.results import Count, Real

TABLE = "heads"
# What a head is measured on.
TEXT, REPEATED = "text", "repeated"

# One row per text, layer and head: sums over queries, and the query at which the head writes most.
ROWS = pa.schema(
    [
        ("on", pa.string()),
        ("text", pa.int32()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("queries", pa.int32()),
        ("again", pa.int32()),
        *((name, pa.float64()) for name in MEASURES),
        ("query", pa.int32()),
        ("norm", pa.float64()),
        ("weights", pa.list_(pa.float32())),
        ("raised", pa.list_(pa.string())),
        ("lowered", pa.list_(pa.string())),
    ]
)
# One row per text: its tokens.
TEXTS = "texts"
TOKENS = pa.schema([("on", pa.string()), ("text", pa.int32()), ("tokens", pa.list_(pa.string()))])


@dataclasses.dataclass(frozen=True)
class HeadResult:
    """One head, as means over queries.

    Attributes:
      layer, head: number of the layer and of the head in it.
      first: weight on the first token.
      previous: weight on the token before.
      self_: weight on the token itself.
      duplicate: weight on earlier places of the same token, where there is one; null without any.
      induction: weight on what followed those places, on repeated random tokens.
      entropy: entropy of the weights over its maximum.
      written: norm of what it adds over the norm of the stream.
      copying: copying score (`lm_jax.inspect.head_measures.copying`).
    """

    layer: Count
    head: Count
    first: Real
    previous: Real
    self_: Real
    duplicate: Real | None
    induction: Real
    entropy: Real
    written: Real
    copying: Real

    @property
    def name(self) -> str:
        """The head as layer.head."""
        return f"{self.layer}.{self.head}"


@dataclasses.dataclass(frozen=True)
class HeadsSummary:
    """What the heads of a model do.

    Attributes:
      model: name of the model in the command.
      model_sha256: identity of the model.
      texts: number of texts.
      tokens: number of their queries.
      repeated: number of repeated sequences.
      heads: results by layer and head.
    """

    model: str
    model_sha256: str
    texts: Count
    tokens: Count
    repeated: Count
    heads: tuple[HeadResult, ...]
