"""The suites that a setting names, answered at several lengths under every recipe.

Where an answer has several tokens, greedy decoding is judged in one forward pass
(`measure.answers`). A wrong answer that continues another needle of its prompt is counted under
that needle's name.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from lm_jax.statistics import Interval
from polyattn_jax.audit import head_sets
from polyattn_jax.audit.audit_suites import first_prompts
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import Columns, where
from polyattn_jax.audit.concentration import dead_fraction, safe_fraction
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import SuiteAblation, SuiteResult
from polyattn_jax.audit.stages import Condition, condition_columns, judge
from polyattn_jax.audit.summary import behaviour
from polyattn_jax.audit.units import ResultStores, run_units
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.suites import Suite
from polyattn_jax.suites.batching import Batch
from polyattn_jax.suites.named import key
from polyattn_jax.suites.prompts import Prompt

STAGE, ABLATION, OTHER = "suites", "ablation", "other"


def evaluate(
    audited: AuditedModel,
    stores: ResultStores,
    conditions: Sequence[Condition],
    suites: dict[str, Suite],
) -> None:
    """Answers or resumes every prompt of the suites under every condition."""
    by_name = {
        f"{condition.name}/{name}": (condition, name) for condition in conditions for name in suites
    }

    def work(unit: str, batch: Batch) -> dict[str, np.ndarray]:
        condition, name = by_name[unit]
        judged = judge(audited, condition, batch)
        columns = condition_columns(condition, name, batch, judged)
        prompts = (suites[name].prompts[i] for i in batch.index_B[batch.valid_B])
        each = zip(prompts, columns["step"], columns["predicted"], strict=True)
        return columns | {"failure": np.array([failure(*one) for one in each])}

    todo = {unit: suites[name] for unit, (_, name) in by_name.items()}
    run_units(audited, stores.suite_answers, conditions[0].stage, todo, work)


def failure(prompt: Prompt, step: int, predicted: int) -> str:
    """Empty for a right answer; else the name of the needle that decoding copies, or "other".

    Args:
      prompt: the prompt; its `meta` has the needles that were not asked for.
      step: the token of the answer that is judged.
      predicted: what decoding writes there, after the answer's own tokens before it.
    """
    answer = prompt.target if isinstance(prompt.target, tuple) else (prompt.target,)
    if predicted == answer[step]:
        return ""
    for name, ids in prompt.meta.get("others", ()):
        if tuple(ids[: step + 1]) == (*answer[:step], predicted):
            return name
    return OTHER


def results(answers: Columns, rows: Columns, config: AuditConfig) -> tuple[SuiteResult, ...]:
    """The results of every suite and length, in the order of the settings."""
    entries = []
    for name, length in config.asked_suites:
        suite = key(name, length)
        own = where(answers, suite=suite, stage=STAGE)
        conditions = behaviour(own, STAGE, config)
        failures = {entry.cell: _failures(where(own, cell=entry.cell)) for entry in conditions}
        safe = {SOFTMAX.name: safe_fraction(rows, suite, None, "auto", config, None)}
        dead: dict[str, Interval | None] = {SOFTMAX.name: None}
        for recipe in config.by_name.values():
            safe[recipe.name] = dead[recipe.name] = None
            if recipe.degree is not None:
                kind = recipe.bias_kind
                safe[recipe.name] = safe_fraction(rows, suite, recipe.degree, kind, config, None)
                dead[recipe.name] = dead_fraction(rows, suite, kind, config, None)
        entries.append(SuiteResult(name, length, conditions, failures, safe, dead))
    return tuple(entries)


def ablated(suites: Mapping[str, Suite], config: AuditConfig) -> dict[str, Suite]:
    """The suites of `config.ablation_suites`, with the prompts of an ablation cell."""
    keys = [key(*one) for one in config.ablated_suites]
    return {name: first_prompts(suites[name], config.ablation_n) for name in keys}


def ablations(answers: Columns, config: AuditConfig) -> tuple[SuiteAblation, ...]:
    """The results of the head sets on these suites."""
    entries = []
    for name, length in config.ablated_suites:
        own = where(answers, suite=key(name, length))
        conditions = behaviour(own, ABLATION, config)
        entries.append(SuiteAblation(name, length, conditions, head_sets.decisiveness(conditions)))
    return tuple(entries)


def _failures(answers: Columns) -> dict[str, int]:
    names, counts = np.unique(answers["failure"].astype(str), return_counts=True)
    return {str(n): int(count) for n, count in zip(names, counts, strict=True) if n}
