"""The prompts that the settings of a check ask for."""

from lm_jax.errors import BadInputError
from polyattn_jax.audit.audited_model import AuditedModel
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
