"""The prompts that the settings of a check ask for."""

import dataclasses

from lm_jax.errors import BadInputError
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.opening import Suites
from polyattn_jax.studies.check import tasks
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites.needle_file import read_needles


def asked(config: CheckConfig, audited: AuditedModel) -> tasks.Asked:
    """The prompts of all tasks but multiple choice, and why some cannot be asked.

    Raises:
      BadInputError, UsageError: as `tasks.build`.
    """
    return tasks.build(
        audited,
        config.tasks,
        length=config.length,
        n=config.n,
        chat=config.chat,
        words=read_needles(config.needle_words) if config.needle_words else None,
    )


def required(config: CheckConfig, audited: AuditedModel) -> tasks.Asked:
    """The prompts of all tasks, each of which must have some.

    Raises:
      BadInputError: a task cannot be asked of this model, or is multiple choice.
    """
    if choice := next((task.name for task in config.tasks if task.kind == "choices"), ""):
        raise BadInputError(
            f"--task={choice} has no prompts with answers, which --hybrid needs; leave it out"
        )
    found = asked(config, audited)
    if found.refused:
        name, why = next(iter(found.refused.items()))
        raise BadInputError(f"--task={name} cannot be asked of this model: {why}")
    return found


# The most prompts of a task that rank heads.
MOST_RANKING = 24


def held_for_ranking(found: tasks.Asked) -> tuple[tasks.Asked, Suites]:
    """The prompts without those that rank heads, and the latter, by `ranking_key`.

    These are the last third of each task, 24 at most.

    Raises:
      BadInputError: a task has fewer than three prompts.
    """
    suites, ranking = {}, {}
    for key, suite in found.suites.items():
        count = min(len(suite.prompts) // 3, MOST_RANKING)
        if not count:
            raise BadInputError(
                f"--rank=task: {suite.name} has {len(suite.prompts)} prompts, a third of which are "
                "to rank the heads; give three or more"
            )
        parts = {key: suite.prompts[:-count], ranking_key(key): suite.prompts[-count:]}
        cut = {name: dataclasses.replace(suite, prompts=part) for name, part in parts.items()}
        suites[key], ranking[ranking_key(key)] = cut.values()
    return dataclasses.replace(found, suites=suites), ranking


def ranking_key(key: str) -> str:
    """The name of the prompts of a task that rank heads in the tables of a check."""
    return f"{key}_ranking"
