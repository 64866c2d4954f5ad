"""Intervals and paired tests for every rate and median that a report prints.

scipy does the statistics; these modules add validation, one result type and what scipy lacks.
"""

from lm_jax.statistics.comparisons import (
    McNemar,
    cohens_d,
    holm,
    mcnemar,
    minimum_detectable_effect,
    noninferiority,
    paired_change,
)
from lm_jax.statistics.intervals import (
    FEWEST_CLUSTERS,
    MANY_CLUSTERS,
    Interval,
    cluster_interval,
    clustered_bootstrap,
    clustered_ratio,
    difference,
    median_interval,
    resampled_interval,
    student_interval,
    wilson,
)

__all__ = [
    "FEWEST_CLUSTERS",
    "MANY_CLUSTERS",
    "Interval",
    "McNemar",
    "cluster_interval",
    "clustered_bootstrap",
    "clustered_ratio",
    "cohens_d",
    "difference",
    "holm",
    "mcnemar",
    "median_interval",
    "minimum_detectable_effect",
    "noninferiority",
    "paired_change",
    "resampled_interval",
    "student_interval",
    "wilson",
]
