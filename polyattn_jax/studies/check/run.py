"""Asks one of three questions: the verdict, the heads that may have the recipe, the rows of texts.

Besides what every study has, the work folder holds the rows by stage and, after `--hybrid`,
`heads.json`, of which the file that it names is a copy.
"""

import dataclasses

from lm_jax.evaluate import multiple_choice
from lm_jax.study import Opened, Work
from polyattn_jax.audit import opening
from polyattn_jax.studies.check import diagnosis, hybrid, verdict
from polyattn_jax.studies.check.results import CheckSummary
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import read_jsonl
from polyattn_jax.suites.needle_file import read_needles


def inputs(config: CheckConfig) -> Opened:
    """The model and the files that a check reads."""
    opened = opening.opened(config.audit)
    return dataclasses.replace(
        opened, inputs={**opened.inputs, **config.files}, load=lambda: _check(config, opened)
    )


def _check(config: CheckConfig, opened: Opened) -> None:
    """Reads all files but the weights; no model is loaded for a faulty one."""
    opened.complete()
    if config.needle_words:
        read_needles(config.needle_words)
    for task in config.tasks:
        if task.kind == "prompts":
            read_jsonl(task.source)
        elif task.kind == "choices":
            multiple_choice.read(task.source, limit=1)


def measure(config: CheckConfig, work: Work) -> CheckSummary:
    """Runs or resumes what the settings ask for."""
    if config.diagnose:
        return diagnosis.measure(config, work)
    if config.hybrid:
        return hybrid.search(config, work)
    return verdict.measure(config, work)
