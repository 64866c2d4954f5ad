"""The summary of a check: of a verdict, of a search for heads, or of a diagnosis.

`polyattn_jax.audit.results` declares the first, `polyattn_jax.audit.results` the second.
"""

import dataclasses

from lm_jax.run.results import Count, Real
from polyattn_jax.audit.results import (
    CheckResult,
    EarlierCheck,
    HybridResult,
    Prevalence,
    SoftmaxComparison,
)
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.recipes.calibrate import Calibration


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows of one head under one bias.

    Attributes:
      rows: number of rows that have a target.
      concentrated: number of these that softmax concentrates, S < 1.
      s_softmax: median over rows of S of softmax.
      s: median over rows of S_p by degree; infinite where half of the rows are dead.
      lost: number of rows that softmax concentrates and r^p does not, by degree.
    """

    layer: Count
    head: Count
    bias_kind: str
    rows: Count
    concentrated: Count
    s_softmax: Real
    s: dict[str, Real]
    lost: dict[str, Count]


@dataclasses.dataclass(frozen=True)
class DiagnosisResult:
    """Diagnosis of the score rows of texts.

    Attributes:
      texts: how many were read, or windows of a plain text.
      documents: how many they are of; intervals are over these.
      tokens: number of tokens of all texts.
      degrees: degrees p of S_p.
      degree: degree of the recipe; null where S_p is not defined for it.
      calibration: calibration of b_auto; null where the recipe does not ask for it.
      prevalence: unsafe rates by bias.
      against_softmax: rows lost and sharpened, by bias and degree.
      heads: rows of each head, by bias, layer and head.
    """

    model: str
    provenance: Provenance
    recipe: str
    degree: float | None
    calibration: Calibration | None
    texts: Count
    documents: Count
    tokens: Count
    degrees: tuple[int | float, ...]
    prevalence: tuple[Prevalence, ...]
    against_softmax: tuple[SoftmaxComparison, ...]
    heads: tuple[HeadRows, ...]


CheckSummary = CheckResult | EarlierCheck | HybridResult | DiagnosisResult
