"""Asks one of three questions: the verdict, the heads that may have the recipe, the rows of texts.

Besides what every study has, the work folder holds the rows by stage and, after `--hybrid`,
`heads.json`, of which the file that it names is a copy.
"""

from lm_jax.study import Opened, Work
from polyattn_jax.audit import opening
from polyattn_jax.studies.check import diagnosis, hybrid, verdict
from polyattn_jax.studies.check.results import CheckSummary
from polyattn_jax.studies.check.settings import CheckConfig


def inputs(config: CheckConfig) -> Opened:
    """The model and the files that a check reads."""
    return opening.opened(config.audit)


def measure(config: CheckConfig, work: Work) -> CheckSummary:
    """Runs or resumes what the settings ask for."""
    if config.diagnose:
        return diagnosis.measure(config, work)
    if config.hybrid:
        return hybrid.search(config, work)
    return verdict.measure(config, work)
