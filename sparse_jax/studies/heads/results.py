"""Results of `iaj sparse heads`: `summary.json`, and the columns of its table."""

import dataclasses

import pyarrow as pa

from lm_jax.inspect.head_measures import MEASURES, WEIGHTS
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
        # Of a head that gives all keys that it sees one weight.
        *((f"equal_{name}", pa.float64()) for name in WEIGHTS),
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
      entropy: entropy of the weights, divided by their sum, over that of equal ones.
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
class EqualWeights:
    """What a head of a layer would be that gives all keys that it sees one weight.

    Attributes:
      layer: number of the layer.
      first, previous, self_, duplicate, induction: means over queries, as of a `HeadResult`.
    """

    layer: Count
    first: Real
    previous: Real
    self_: Real
    duplicate: Real | None
    induction: Real


@dataclasses.dataclass(frozen=True)
class HeadsSummary:
    """What the heads of a model do.

    Attributes:
      model: name of the model in the command.
      model_sha256: identity of the model.
      texts: number of texts.
      tokens: number of their queries.
      again: number of these whose token came before.
      repeated: number of rows of random tokens, each twice.
      twice: number of their queries whose token came before.
      heads: results by layer and head.
      equal: results of equal weights by layer.
    """

    model: str
    model_sha256: str
    texts: Count
    tokens: Count
    again: Count
    repeated: Count
    twice: Count
    heads: tuple[HeadResult, ...]
    equal: tuple[EqualWeights, ...]
