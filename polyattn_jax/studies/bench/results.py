"""Results of `iaj polyattn bench`: `summary.json`, and the columns of `turns.parquet`."""

import dataclasses

import pyarrow as pa

from lm_jax.run.results import Count, Real
from polyattn_jax.audit.results.provenance import Provenance

# What recipes are compared with.
SOFTMAX = "softmax"

# One row per length, method and turn: seconds per token.
TURNS = pa.schema(
    [
        ("length", pa.int32()),
        ("method", pa.string()),
        ("turn", pa.int32()),
        ("seconds", pa.float64()),
        ("state_bytes", pa.int64()),
    ]
)


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """One method after a text of one length.

    Attributes:
      method: spec of a recipe, or "softmax".
      state_bytes: bytes of the cache or the state of one text.
      seconds: seconds per token, of each turn.
    """

    length: Count
    method: str
    state_bytes: Count
    seconds: tuple[Real, ...]


@dataclasses.dataclass(frozen=True)
class BenchSummary:
    """How fast a model decodes, and what it keeps.

    Attributes:
      model_sha256: identity of the model.
      device: kind of the device.
      cores: number of processor cores.
      dtype: dtype of weights and caches.
      tokens: number of tokens of a turn.
      turns: number of turns.
      deviations: largest difference of decoded logits from those of whole rows, over all tokens,
        relative to the largest logit, by recipe.
      compared: number of tokens of the text that they are taken on, by recipe.
      results: entries by length and method.
    """

    model: str
    model_sha256: str
    provenance: Provenance
    device: str
    cores: Count
    dtype: str
    tokens: Count
    turns: Count
    deviations: dict[str, Real]
    compared: dict[str, Count]
    results: tuple[BenchResult, ...]

    def softmax(self, length: int) -> BenchResult:
        """Softmax after a text of this length."""
        return next(r for r in self.results if (r.length, r.method) == (length, SOFTMAX))
