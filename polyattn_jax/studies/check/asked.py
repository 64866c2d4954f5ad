"""The prompts that the settings of a check ask for."""

import dataclasses

from lm_jax.errors import BadInputError
from lm_jax.text.tokenizer import Tokenizer
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.opening import Suites
from polyattn_jax.studies.check import tasks
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import control
from polyattn_jax.suites.needle_file import read_needles


def asked(config: CheckConfig, audited: AuditedModel, *, more: int = 0) -> tasks.Asked:
    """The prompts of all tasks but multiple choice, and why some cannot be asked.

    There are `more` than the settings have of each, where a task has as many.

    Raises:
      BadInputError, UsageError: as `tasks.build`.
    """
    return tasks.build(
        audited,
        config.tasks,
        length=config.length,
        n=config.n + more,
        chat=config.chat,
        words=read_needles(config.needle_words) if config.needle_words else None,
    )


def required(config: CheckConfig, audited: AuditedModel, *, more: int = 0) -> tasks.Asked:
    """The prompts of all tasks, each of which must have some; `more` as of `asked`.

    Raises:
      BadInputError: a task cannot be asked of this model, or is multiple choice.
    """
    if choice := next((task.name for task in config.tasks if task.kind == "choices"), ""):
        raise BadInputError(
            f"--task={choice} has no prompts with answers, which --hybrid needs; leave it out"
        )
    found = asked(config, audited, more=more)
    if found.refused:
        name, why = next(iter(found.refused.items()))
        raise BadInputError(f"--task={name} cannot be asked of this model: {why}")
    return found


# The most prompts of a task that rank heads.
MOST_RANKING = 24


def held_for_ranking(found: tasks.Asked, tokenizer: Tokenizer) -> tuple[tasks.Asked, Suites]:
    """The prompts without those that rank heads, and the latter, by `ranking_key`.

    These are every third prompt of each task, 24 at most.

    Args:
      found: all prompts.
      tokenizer: the model's own, for the controls of those that are left.

    Raises:
      BadInputError: a task has fewer than three prompts.
    """
    suites, controls, ranking = {}, {}, {}
    for key, suite in found.suites.items():
        held = set(range(2, len(suite.prompts), 3)[:MOST_RANKING])
        if not held:
            raise BadInputError(
                f"--rank=task: {suite.name} has {len(suite.prompts)} prompts, a third of which are "
                "to rank the heads; give three or more"
            )
        parts = [
            tuple(prompt for at, prompt in enumerate(suite.prompts) if (at in held) == ranks)
            for ranks in (False, True)
        ]
        rest, ranking[ranking_key(key)] = (dataclasses.replace(suite, prompts=p) for p in parts)
        suites[key] = rest
        made = control.control(rest, tokenizer, tasks.MOST_CONTROL)
        if made is not None:
            controls[key] = made
    return dataclasses.replace(found, suites=suites, controls=controls), ranking


def ranking_key(key: str) -> str:
    """The name of the prompts of a task that rank heads in the tables of a check."""
    return f"{key}_ranking"
