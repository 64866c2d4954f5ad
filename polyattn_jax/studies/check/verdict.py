"""The needle verdict on one recipe in every head, with the rows that explain it."""

from typing import Any

from lm_jax.study import Work
from polyattn_jax.audit import (
    bias_tables,
    decision,
    model_calibration,
    recipe_rows,
    stages,
    summary,
    units,
)
from polyattn_jax.audit.audit_suites import PROMPTS, TEXTS, build_suites
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.opening import OpenAudit, Suites, open_audit
from polyattn_jax.audit.results import (
    CheckResult,
    ConditionResult,
    PromptResults,
    RowShares,
    SoftmaxComparison,
    TextLoss,
    TextResults,
)
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import SOFTMAX, Calibrated, Recipe, parse_recipe, resolve_bias
from polyattn_jax.studies.check.numbers import row_findings, unsafe
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import Suite

RowFindings = dict[str, tuple[RowShares, SoftmaxComparison | None]]


def measure(config: CheckConfig, work: Work) -> CheckResult:
    """Runs or resumes a check and returns its result."""
    with open_audit(config.audit, work, suites) as opened:
        audited, stores = opened.model, opened.stores
        settings = audited.config
        recipe, probe = parse_recipe(settings.recipes[0]), _probe(settings)
        calibration = None
        if recipe.bias == "auto" or (recipe.degree is not None and recipe.bias == 0.0):
            calibration = model_calibration.calibrated(audited, work.path)
        b_auto = calibration.bias if calibration else None
        calibrated = bias_tables.calibrated(audited, work.path, settings.by_name, b_auto)
        of_suite = _rows(opened, recipe, resolve_bias(recipe, calibrated), b_auto)
        safe, against = of_suite[probe]
        base, entry = answered(audited, stores, opened.suites, probe, calibrated)
        own = None
        if settings.prompts:
            own = PromptResults(*answered(audited, stores, opened.suites, PROMPTS, calibrated))
        texts = None
        if settings.text:
            losses = losses_on_texts(audited, stores, opened.suites[TEXTS], calibrated)
            shares, change = of_suite[TEXTS]
            texts = TextResults(*losses, unsafe(shares), change)
    measured = _is_measured(recipe)
    decided = decision.explain(
        entry,
        base,
        safe.recipe,
        safe.recipe_top,
        unmeasured="no row has a target" if measured else recipe.unmeasured,
        tolerance=settings.tolerance,
        ablated=False,
        dead=(safe.dead, safe.dead_top),
    )
    bias = resolve_bias(recipe, calibrated)
    return CheckResult(
        model=settings.model,
        provenance=read_provenance(work.path, settings),
        recipe=recipe.spec,
        degree=recipe.map.degree,
        bias=bias_tables.plain(bias),
        calibration=calibration,
        measured=measured,
        length=settings.sweep_length,
        heads=min(settings.top_heads, audited.model.cfg.num_layers * audited.model.cfg.num_heads),
        unsafe=unsafe(safe),
        against_softmax=against,
        prompts=own,
        texts=texts,
        softmax=base.accuracy,
        substituted=entry.accuracy,
        delta=entry.delta,
        p_value=entry.p_value,
        lost=entry.lost,
        won=entry.won,
        dead_rows_per_prompt=entry.dead_rows_per_prompt,
        could_decide=decided.could_decide,
        least_prompts=decided.least_prompts,
        linear=linear_state(recipe, bias, audited.model.cfg),
        verdict=decided.verdict,
        reason=decided.reason,
        next=decided.next,
    )


def suites(audited: AuditedModel) -> Suites:
    """The suites that a check reads."""
    built = build_suites(audited)
    names = (_probe(audited.config), "induction", PROMPTS, TEXTS)
    return {name: built[name] for name in names if name in built}


def _probe(config: AuditConfig) -> str:
    return f"niah_{config.sweep_length}"


def _is_measured(recipe: Recipe) -> bool:
    """Whether rows have a statistic of this recipe."""
    return recipe.degree is not None or recipe_rows.measured(recipe)


def _rows(opened: OpenAudit, recipe: Recipe, bias: Any, b_auto: float | None) -> RowFindings:
    """Diagnoses the rows, or resumes it; what they say of needles and texts."""
    audited, stores, held = opened.model, opened.stores, opened.suites
    unmeasured = RowShares(), None
    results: RowFindings = {_probe(audited.config): unmeasured, TEXTS: unmeasured}
    names = results.keys() & held.keys()
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


def answered(
    audited: AuditedModel,
    stores: units.ResultStores,
    suites: Suites,
    name: str,
    calibrated: Calibrated,
) -> tuple[ConditionResult, ConditionResult]:
    """Runs or resumes the answers to one suite; the results of softmax and of the recipe."""
    stage = PROMPTS if name == PROMPTS else "sweep"
    conditions = stages.sweep_conditions(audited, calibrated, stage)
    stages.evaluate(audited, stores, conditions, {name: suites[name]})
    result = summary.behaviour(columns(stores.answers.read()), stage, audited.config)
    by_cell = {entry.cell: entry for entry in result}
    return by_cell[SOFTMAX.name], by_cell[conditions[-1].name]


def losses_on_texts(
    audited: AuditedModel, stores: units.ResultStores, suite: Suite, calibrated: Calibrated
) -> tuple[TextLoss, TextLoss]:
    """Measures or resumes the loss on texts of the user, with softmax and with the recipe."""
    conditions = stages.sweep_conditions(audited, calibrated, TEXTS)
    stages.text_losses(audited, stores, conditions, suite)
    result = summary.text_losses(
        columns(stores.text_losses.read()), TEXTS, one_document=audited.config.one_document
    )
    by_cell = {entry.cell: entry for entry in result}
    return by_cell[SOFTMAX.name], by_cell[conditions[-1].name]
