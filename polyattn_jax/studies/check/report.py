"""The report of a check, of whichever question it was asked."""

from pathlib import Path

from lm_jax.report import Report
from polyattn_jax.audit.results import EarlierCheck, HybridResult
from polyattn_jax.studies.check import diagnosis_report, hybrid_report, verdict_report
from polyattn_jax.studies.check.results import CheckSummary, DiagnosisResult
from polyattn_jax.studies.check.settings import CheckConfig


def build(config: CheckConfig, summary: CheckSummary, folder: Path) -> Report:
    """The report of a summary."""
    if isinstance(summary, DiagnosisResult):
        return diagnosis_report.build(summary)
    if isinstance(summary, HybridResult):
        return hybrid_report.build(summary, Path(config.hybrid), folder)
    return verdict_report.build(summary.current if isinstance(summary, EarlierCheck) else summary)
