"""Results of `iaj sparse lens`: `summary.json`, and the columns of its two tables."""

import dataclasses

import pyarrow as pa

from lm_jax.run.results import Count, Real

# How each lens is called.
LOGIT, JACOBIAN = "logit lens", "Jacobian lens"
LENSES = (LOGIT, JACOBIAN)
LENS_FILE, COMPARED, READOUTS, SPLIT = "lens.safetensors", "compared", "readouts", "split"

# One row per text, layer and lens: sums over its tokens.
COMPARISONS = pa.schema(
    [
        ("text", pa.int32()),
        ("layer", pa.int32()),
        ("lens", pa.string()),
        ("tokens", pa.int32()),
        ("divergence", pa.float64()),
        ("agreeing", pa.int32()),
    ]
)
# One row per prompt, layer, position and lens: the most probable token.
TOKENS = pa.schema(
    [
        ("prompt", pa.int32()),
        ("layer", pa.int32()),
        ("position", pa.int32()),
        ("lens", pa.string()),
        ("read", pa.string()),
        ("probability", pa.float64()),
        ("token", pa.string()),
    ]
)

# One row per prompt, layer that is read, and head above it (`lm_jax.inspect.lens_split`).
SHARES = pa.schema(
    [
        ("prompt", pa.int32()),
        ("layer", pa.int32()),
        ("token", pa.string()),
        ("total", pa.float64()),
        ("edges", pa.float64()),
        ("at", pa.int32()),
        ("head", pa.int32()),
        ("share", pa.float64()),
        # Standard error of the share over the texts.
        ("error", pa.float64()),
        ("bypass", pa.float64()),
    ]
)


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """One layer by both lenses, over the tokens of the held-out texts.

    Attributes:
      layer: number of the block whose output is read.
      divergence: mean KL of the model's next-token distribution from the lens', in nats, by lens.
      agreeing: share of tokens at which the lens' most probable token is the model's, by lens.
      spread: relative standard error of the layer's Jacobian; null where it is not known.
      change: norm of the Jacobian less the identity, over the norm of the Jacobian.
    """

    layer: Count
    divergence: dict[str, Real]
    agreeing: dict[str, Real]
    spread: Real | None
    change: Real


@dataclasses.dataclass(frozen=True)
class LensSummary:
    """What the lenses of a model read.

    Attributes:
      model: name of the model in the command.
      model_sha256: identity of the model.
      prompts: number of texts of the fit.
      rows: number of rows that each gave.
      skipped: first tokens that were left out.
      texts: number of held-out texts.
      tokens: number of their tokens.
      layers: results by layer, the last block among them.
      readouts: the prompts that were read out.
    """

    model: str
    model_sha256: str
    prompts: Count
    rows: Count
    skipped: Count
    texts: Count
    tokens: Count
    layers: tuple[LayerResult, ...]
    readouts: tuple[str, ...]
