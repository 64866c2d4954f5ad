"""Multiple choice under every recipe: what substitution does to a model beyond one token.

The answer is the choice of the highest log-likelihood (`lm_jax.evaluate.multiple_choice`). Softmax
and every recipe, in all heads, score the same questions, so each recipe is paired with softmax. The
scores are kept in the work folder, one store for each condition: a killed audit resumes, and
settings that do not change them need no new ones.
"""

from collections.abc import Mapping, Sequence
import contextlib
from pathlib import Path

import jax
import numpy as np

from lm_jax.errors import StoppedError
from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice import Question, Scorer
from lm_jax.evaluate.multiple_choice.results import ChoiceTask, Comparison
from lm_jax.run import processes, stop
from lm_jax.run.results import parse_result
from lm_jax.run.rows import RowStore
from polyattn_jax.audit import measure
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.stages import Condition, substitution
from polyattn_jax.recipes.hybrid_recipe import replaced_heads

SCORES = "choices"
# The most tokens in a batch, of which all logits are held at once, for each device of its axes.
BATCH_TOKENS = 1024
_WHERE = "during multiple choice"


def read_questions(config: AuditConfig) -> dict[str, list[Question]]:
    """The questions of an audit by task; empty without tasks."""
    return multiple_choice.read_tasks(
        config.choices, truthfulqa_file=config.truthfulqa, limit=config.choices_n or None
    )


def evaluate(
    audited: AuditedModel,
    folder: Path,
    conditions: Sequence[Condition],
    questions: Mapping[str, Sequence[Question]],
) -> dict[str, ChoiceTask]:
    """Scores or resumes the choices under every condition; each is paired with the first.

    Several processes share out the conditions; the result is empty in all but the first. One that
    is asked to stop scores no further batch, and all stop once each has come to its end.

    Args:
      audited: the model.
      folder: the work folder.
      conditions: result of `stages.sweep_conditions`, softmax first.
      questions: questions by task; without any the result is empty.

    Raises:
      StoppedError: a process was asked to stop; what was scored is kept.
    """
    if not questions:
        return {}
    if jax.process_count() > 1:
        own = conditions[jax.process_index() :: jax.process_count()]
        if own:
            # Alone, it would leave the others waiting.
            with contextlib.suppress(StoppedError):
                _compared(audited, folder, own, questions)
        processes.wait_for_all()
        if processes.share_stop():
            stop.check(_WHERE)
        if not processes.is_first():
            return {}
    return _compared(audited, folder, conditions, questions)


def _compared(
    audited: AuditedModel,
    folder: Path,
    conditions: Sequence[Condition],
    questions: Mapping[str, Sequence[Question]],
) -> dict[str, ChoiceTask]:
    quiet = not processes.is_first()
    with contextlib.ExitStack() as stack:
        scorers = {
            condition.name: _scorer(audited, condition, stack, folder) for condition in conditions
        }
        compared = multiple_choice.compare(scorers, questions, quiet=quiet)
    return parse_result(compared, Comparison).tasks


def open_scores(audited: AuditedModel, condition: Condition, folder: Path) -> RowStore:
    """Opens, as a context, the scores of one condition in a work folder."""
    settings = {
        "dtype": audited.config.dtype,
        "recipe": condition.recipe.spec,
        "bias": np.asarray(condition.bias, np.float64).tolist(),
        "kernels": audited.fused,
    }
    if not condition.heads_LN.all():
        settings["heads"] = replaced_heads(condition.heads_LN)
    return multiple_choice.open_cache(
        folder / SCORES, model=audited.model.identity.text, settings=settings
    )


def _scorer(
    audited: AuditedModel, condition: Condition, stack: contextlib.ExitStack, folder: Path
) -> Scorer:
    def logits(tokens_BT: np.ndarray, valid_BT: np.ndarray) -> jax.Array:
        stop.check(_WHERE)
        tokens, valid = audited.put(tokens_BT, valid_BT)
        return measure.logits(
            audited.model.params, tokens, valid_BT=valid, **substitution(audited, condition)
        )

    cfg, ways = audited.model.cfg, 1
    if audited.mesh is not None:
        ways = audited.mesh.shape["data"] * audited.mesh.shape["fsdp"]
    return Scorer(
        logits=logits,
        tokenizer=audited.tokenizer,
        max_length=cfg.max_length,
        # Every device of the batch axes gets a row of the longest batch.
        batch_tokens=BATCH_TOKENS if ways == 1 else ways * max(BATCH_TOKENS, cfg.max_length),
        cache=stack.enter_context(open_scores(audited, condition, folder)),
    )
