"""The verdict on one recipe in every head by its tasks, with the rows that explain it."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.study import Work
from polyattn_jax.audit import audit_suites, bias_tables, recipe_rows, stages
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.opening import OpenAudit, Suites, open_audit
from polyattn_jax.audit.results import CheckResult, RowShares, SoftmaxComparison, TextResults
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.gates import GATES
from polyattn_jax.recipes.hybrid_recipe import check_model
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import SOFTMAX, Calibrated, Recipe, parse_recipe, resolve_bias
from polyattn_jax.recipes.trained_model import with_trained
from polyattn_jax.studies.check import decisions, tasks
from polyattn_jax.studies.check.asked import asked as asked_of
from polyattn_jax.studies.check.numbers import row_findings, unsafe
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import induction

# The suite by whose rows heads are ranked.
RANKING = "induction"
# Of trained heads: why no row counts for the verdict, and what to do where they lose.
UNTRAINED = "the rows are of the recipe without its training"
TRAIN_MORE = "train longer and on more text, or replace fewer heads"
RowFindings = dict[str, tuple[RowShares, SoftmaxComparison | None]]


def measure(config: CheckConfig, work: Work) -> CheckResult:
    """Runs or resumes a check and returns its result."""
    asked = tasks.Asked({}, {}, {})

    def suites(audited: AuditedModel) -> Suites:
        nonlocal asked
        asked = asked_of(config, audited)
        return asked.with_controls | _others(audited, asked)

    with open_audit(config.audit, work, suites) as given:
        opened = _with_trained(config, given)
        audited, settings = opened.model, opened.model.config
        recipe, heads_LN = parse_recipe(settings.recipes[0]), None
        calibration, b_auto = None, None
        if config.heads is not None:
            check_model(config.heads, audited.model, config.recipe)
            heads_LN = config.heads.heads_LN
            calibrated: Calibrated = {str(recipe.bias): np.asarray(config.heads.bias)}
        else:
            if recipe.bias == "auto" or (recipe.degree is not None and recipe.bias == 0.0):
                calibration = opened.calibrate()
            b_auto = calibration.bias if calibration else None
            calibrated = opened.biases(settings.by_name, b_auto)
        bias = resolve_bias(recipe, calibrated)
        # The rows of the first task that has any explain the verdict.
        keys = {task: task.key(config.length) for task in config.tasks}
        probe = next((task for task, key in keys.items() if key in asked.suites), None)
        key = keys[probe] if probe else ""
        of_suite = _rows(opened, recipe, bias, b_auto, (key, TEXTS))
        safe, against = of_suite.get(key, (RowShares(), None))
        answers = _answers(config, opened, asked, calibrated, recipe, heads_LN)
        texts = None
        if settings.text:
            conditions = stages.sweep_conditions(audited, calibrated, TEXTS, heads_LN=heads_LN)
            losses = opened.text_losses(conditions, TEXTS, one_document=settings.one_document)
            shares, change = of_suite[TEXTS] if config.trained is None else (RowShares(), None)
            texts = TextResults(losses[SOFTMAX.name], losses[recipe.name], unsafe(shares), change)
    measured = _is_measured(recipe)
    unmeasured = "no row has a target" if measured else recipe.unmeasured
    # Rows of the recipe without its training say nothing of what was trained.
    read = probe.name if probe and config.trained is None else ""
    unread = "its rows were not measured" if config.trained is None else UNTRAINED
    results = decisions.holm(
        decisions.task_result(
            name,
            own,
            safe if name == read else RowShares(),
            unmeasured=unmeasured if name == read else unread,
            tolerance=settings.tolerance,
        )
        for name, own in answers.items()
    )
    if config.trained is not None:
        results = tuple(
            dataclasses.replace(each, next=TRAIN_MORE) if each.verdict == "no-go" else each
            for each in results
        )
    decided = decisions.overall(results, asked.refused, tolerance=settings.tolerance)
    return CheckResult(
        model=settings.model,
        provenance=read_provenance(work.path, settings),
        recipe=recipe.spec,
        degree=recipe.map.degree,
        bias=bias_tables.plain(bias),
        calibration=calibration,
        measured=measured,
        length=config.length,
        heads=min(settings.top_heads, math.prod(audited.shape)),
        rows_of=probe.name if probe else "",
        unsafe=unsafe(safe),
        against_softmax=against,
        texts=texts,
        tasks=results,
        refused=asked.refused,
        linear=linear_state(recipe, bias, audited.model.cfg),
        verdict=decided.verdict,
        reason=decided.reason,
        next=decided.next,
        replaced=None if heads_LN is None else int(heads_LN.sum()),
        of_heads=math.prod(audited.shape),
        gated=GATES in audited.model.params,
        trained=config.trained is not None,
    )


def _with_trained(config: CheckConfig, opened: OpenAudit) -> OpenAudit:
    """The same, of which the model has the trained heads of the settings, if there are any."""
    if config.trained is None:
        return opened
    audited = opened.model
    model = with_trained(audited.model, config.trained, config.recipe, audited.mesh)
    return dataclasses.replace(opened, model=dataclasses.replace(audited, model=model))


def _others(audited: AuditedModel, asked: tasks.Asked) -> Suites:
    """Induction prompts, which rank the heads, and the texts of the user."""
    config, found = audited.config, Suites()
    try:
        found[RANKING] = induction(
            vocabulary=audited.tokenizer,
            length=config.induction_length,
            n=config.induction_n,
            seed=config.seed,
            max_length=audited.model.cfg.max_length,
        )
    except BadInputError as error:
        asked.refused["the ranking of heads by induction"] = str(error)
    if config.text:
        found[TEXTS] = audit_suites.texts(audited)
    return found


def _answers(
    config: CheckConfig,
    opened: OpenAudit,
    asked: tasks.Asked,
    calibrated: Calibrated,
    recipe: Recipe,
    heads_LN: np.ndarray | None,
) -> dict[str, tasks.Answers]:
    """The answers to all tasks that can be asked, in their order."""
    chosen = tasks.choose(opened, config.tasks, calibrated, recipe, n=config.n, heads_LN=heads_LN)
    answers = {}
    for task in config.tasks:
        if task.key(config.length) in asked.suites:
            answers[task.name] = tasks.ask(
                opened,
                task,
                asked,
                calibrated,
                recipe,
                length=config.length,
                heads_LN=heads_LN,
            )
        elif task.name in chosen:
            answers[task.name] = chosen[task.name]
    return answers


def _is_measured(recipe: Recipe) -> bool:
    """Whether rows have a statistic of this recipe."""
    return recipe.degree is not None or recipe_rows.measured(recipe)


def _rows(
    opened: OpenAudit, recipe: Recipe, bias: Any, b_auto: float | None, wanted: Sequence[str]
) -> RowFindings:
    """Diagnoses the rows of suites and of induction, or resumes it; what they say of each."""
    audited, stores = opened.model, opened.stores
    names = [name for name in wanted if name in opened.suites]
    results: RowFindings = dict.fromkeys(wanted, (RowShares(), None))
    ranking = [RANKING] * (RANKING in opened.suites)
    held = {name: opened.suites[name] for name in dict.fromkeys([*names, *ranking])}
    if recipe.degree is not None:
        biases = {"zero": 0.0, "auto": bias if b_auto is None else b_auto}
        stages.diagnose(audited, stores, held, biases)
        rows, at_zero = columns(stores.rows.read()), recipe.bias == 0.0
        for name in names:
            results[name] = row_findings(audited, rows, name, recipe.degree, at_zero=at_zero)
    elif recipe_rows.measured(recipe):
        recipe_rows.diagnose(audited, stores, held, {recipe: bias})
        rows = columns(stores.recipe_rows.read())
        for name in names:
            results[name] = recipe_rows.shares(rows, audited, recipe, name)
    return results
