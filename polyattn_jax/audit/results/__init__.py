"""Results of an audit and of a check: the dataclasses of their `summary.json`.

The report shows the numbers of `summary.json` and draws the parquet files (columns:
`polyattn_jax.audit.schema`). Rates, shares and accuracies are between 0 and 1, losses in nats,
intervals of 95 %. A suite is named as in `suites.json`: `niah_256`, `control`, `induction`, `mqar`,
`prompts`. A kind of bias is `zero`, `auto`, or the number b of a recipe.
"""

from polyattn_jax.audit.results.audit import (
    AuditSummary,
    Controls,
    CopyResult,
    Decisiveness,
    HeadTypes,
    RecipeVerdict,
    SuiteAblation,
)
from polyattn_jax.audit.results.check import CheckResult, TaskResult, TextResults
from polyattn_jax.audit.results.conditions import (
    ConditionResult,
    LossInterval,
    TextLoss,
    VerdictName,
)
from polyattn_jax.audit.results.earlier_check import EarlierCheck
from polyattn_jax.audit.results.hybrid import HeadSet, HybridResult, Search, SingleHead
from polyattn_jax.audit.results.matched import MatchedSafety, SafeShares
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.results.rows import (
    ActiveMedians,
    BoundAgreement,
    Prevalence,
    RowShares,
    SoftmaxComparison,
)
from polyattn_jax.audit.results.suites import SuiteResult

__all__ = [
    "ActiveMedians",
    "AuditSummary",
    "BoundAgreement",
    "CheckResult",
    "ConditionResult",
    "Controls",
    "CopyResult",
    "Decisiveness",
    "EarlierCheck",
    "HeadSet",
    "HeadTypes",
    "HybridResult",
    "LossInterval",
    "MatchedSafety",
    "Prevalence",
    "Provenance",
    "RecipeVerdict",
    "RowShares",
    "SafeShares",
    "Search",
    "SingleHead",
    "SoftmaxComparison",
    "SuiteAblation",
    "SuiteResult",
    "TaskResult",
    "TextLoss",
    "TextResults",
    "VerdictName",
]
