"""The needle verdict on one recipe in every head, with the rows that explain it."""

from collections.abc import Callable
import functools
import math
from typing import Any, TypeVar

from lm_jax.study import Work
from polyattn_jax.audit import bias_tables, decision, recipe_rows, stages
from polyattn_jax.audit.audit_suites import PROMPTS, TEXTS, build_suites
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.opening import OpenAudit, Suites, open_audit
from polyattn_jax.audit.results import (
    CheckResult,
    PromptResults,
    RowShares,
    SoftmaxComparison,
    TextResults,
)
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import SOFTMAX, Recipe, parse_recipe, resolve_bias
from polyattn_jax.studies.check.numbers import row_findings, unsafe
from polyattn_jax.studies.check.settings import CheckConfig

T = TypeVar("T")
RowFindings = dict[str, tuple[RowShares, SoftmaxComparison | None]]


def measure(config: CheckConfig, work: Work) -> CheckResult:
    """Runs or resumes a check and returns its result."""
    with open_audit(config.audit, work, suites) as opened:
        audited, settings = opened.model, opened.model.config
        recipe = parse_recipe(settings.recipes[0])
        calibration = None
        if recipe.bias == "auto" or (recipe.degree is not None and recipe.bias == 0.0):
            calibration = opened.calibrate()
        b_auto = calibration.bias if calibration else None
        calibrated = opened.biases(settings.by_name, b_auto)
        bias = resolve_bias(recipe, calibrated)
        of_suite = _rows(opened, recipe, bias, b_auto)
        safe, against = of_suite[settings.probe]

        def both(stage: str, ask: Callable[..., dict[str, T]], suite: str) -> tuple[T, T]:
            """The results of softmax and of the recipe in every head."""
            conditions = stages.sweep_conditions(audited, calibrated, stage)
            by_cell = ask(conditions, suite)
            return by_cell[SOFTMAX.name], by_cell[recipe.name]

        base, entry = both("sweep", opened.evaluate, settings.probe)
        own = texts = None
        if settings.prompts:
            own = PromptResults(*both(PROMPTS, opened.evaluate, PROMPTS))
        if settings.text:
            measure_losses = functools.partial(
                opened.text_losses, one_document=settings.one_document
            )
            shares, change = of_suite[TEXTS]
            texts = TextResults(*both(TEXTS, measure_losses, TEXTS), unsafe(shares), change)
    measured = _is_measured(recipe)
    decided = decision.explain(
        entry,
        base,
        safe,
        unmeasured="no row has a target" if measured else recipe.unmeasured,
        tolerance=settings.tolerance,
        ablated=False,
    )
    return CheckResult(
        model=settings.model,
        provenance=read_provenance(work.path, settings),
        recipe=recipe.spec,
        degree=recipe.map.degree,
        bias=bias_tables.plain(bias),
        calibration=calibration,
        measured=measured,
        length=settings.sweep_length,
        heads=min(settings.top_heads, math.prod(audited.shape)),
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
    built = build_suites(audited, lengths="--length")
    names = (audited.config.probe, "induction", PROMPTS, TEXTS)
    return {name: built[name] for name in names if name in built}


def _is_measured(recipe: Recipe) -> bool:
    """Whether rows have a statistic of this recipe."""
    return recipe.degree is not None or recipe_rows.measured(recipe)


def _rows(opened: OpenAudit, recipe: Recipe, bias: Any, b_auto: float | None) -> RowFindings:
    """Diagnoses the rows, or resumes it; what they say of needles and texts."""
    audited, stores, held = opened.model, opened.stores, opened.suites
    unmeasured = RowShares(), None
    results: RowFindings = {audited.config.probe: unmeasured, TEXTS: unmeasured}
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
