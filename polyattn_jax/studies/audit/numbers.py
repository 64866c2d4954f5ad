"""The summary of an audit, computed from its parquet tables: every number of the report.

Rates over rows are in `polyattn_jax.audit.concentration`, accuracies and losses of conditions in
`polyattn_jax.audit.summary`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from polyattn_jax.audit import decision, head_sets, head_types
from polyattn_jax.audit.columns import Columns, columns, degrees, where
from polyattn_jax.audit.concentration import (
    Rows,
    against_softmax,
    cells,
    clusters,
    decided_share,
    prevalence,
    row_shares,
    share,
    unsafe,
)
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import (
    AuditSummary,
    BoundAgreement,
    ConditionResult,
    Controls,
    CopyResult,
    LossInterval,
    RecipeVerdict,
    RowShares,
    SuiteAblation,
    SuiteResult,
)
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.summary import (
    accuracy,
    behaviour,
    heads,
    ranking,
    ranking_suite,
    text_losses,
)
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.recipes.linear_state import LinearState
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.studies.audit.matched import matched

EPSILON = 1e-6


def bound(rows: Columns, config: AuditConfig) -> tuple[BoundAgreement, ...]:
    """Safety by suite, bias and degree: predicted (p >= p*) against measured (S_p < 1) (Table 8).

    False negatives are rows that the bound calls safe and the measure does not. In exact arithmetic
    they are ties (S_p = 1), which `false_negative_eps` leaves out. Rows of which rounding leaves
    open whether they are safe are in none of these counts but in `undecided`; the interval of
    `agree` allows for both. The p* of a row counts as computed.
    """
    results = []
    for suite, kind in cells(rows):
        c = where(rows, suite=suite, bias_kind=kind, target="argmax", status=int(Status.ACTIVE))
        for p in degrees(c):
            predicted, missed = c["p_star"] <= p, unsafe(c, p)
            agree = Rows(
                *(np.where(predicted, *both) for both in zip(~missed, missed, strict=True))
            )
            beyond = unsafe(c, p, EPSILON)
            results.append(
                BoundAgreement(
                    suite=suite,
                    bias_kind=kind,
                    p=p,
                    n=len(predicted),
                    agree=decided_share(agree, clusters(c, config), config)
                    if len(predicted)
                    else None,
                    false_negative=int(np.sum(predicted & missed.sure)),
                    false_negative_eps=int(np.sum(predicted & beyond.sure)),
                    false_positive=int(np.sum(~predicted & ~missed.possible)),
                    undecided=int(missed.undecided.sum()),
                )
            )
    return tuple(results)


def controls(answers: Columns, losses: Columns, config: AuditConfig) -> Controls:
    """What softmax does on the control prompts."""
    c = where(answers, stage="control")
    by_suite = {suite: accuracy(where(c, suite=suite)) for suite in dict.fromkeys(c["suite"])}
    first, second = (_copy_result(where(losses, copy=copy), config) for copy in (1, 2))
    unmet = decision.unmet_controls(
        by_suite[config.probe],
        by_suite.get("control"),
        first.loss.estimate,
        second.loss.estimate,
    )
    return Controls(by_suite, first, second, unmet)


def _copy_result(losses: Columns, config: AuditConfig) -> CopyResult:
    loss = share(losses["loss"], losses["prompt"], config, (0.0, np.inf))
    return CopyResult(
        loss=LossInterval(**dataclasses.asdict(loss)),
        top_1=share(losses["correct"], losses["prompt"], config),
        tokens=int(losses["tokens"].sum()),
    )


def verdicts(
    rows: Columns,
    by_head: Columns,
    swept: Sequence[ConditionResult],
    unmet: Sequence[str],
    config: AuditConfig,
    own: Mapping[str, RowShares],
) -> tuple[RecipeVerdict, ...]:
    """One verdict per recipe of the sweep; `own` holds the safe shares of `recipe_rows`."""
    base = next(entry for entry in swept if entry.cell == SOFTMAX.name)
    top, suite = ranking(by_head)[: config.top_heads], config.probe
    results = []
    for entry in swept:
        if entry is base:
            continue
        recipe = config.by_name[entry.recipe]
        shares, unmeasured = own.get(recipe.name, RowShares()), recipe.unmeasured
        if recipe.degree is not None:
            place = (rows, suite, recipe.degree, recipe.bias_kind, config)
            shares, unmeasured = row_shares(*place, top), "no row has a target"
        results.append(
            decision.explain(
                entry,
                base,
                shares,
                unmeasured=unmeasured,
                tolerance=config.tolerance,
                ablated=bool(config.ablation_heads),
                unmet=unmet,
            )
        )
    return decision.corrected(results)


class Tables(NamedTuple):
    """What the stages of an audit measured (columns: `schema`)."""

    rows: pa.Table
    answers: pa.Table
    losses: pa.Table
    features: pa.Table
    text_losses: pa.Table


class Source(NamedTuple):
    """What was audited: digest, family and names of its weight files; the run's provenance."""

    model_sha256: str
    family: str
    weights: tuple[str, ...]
    provenance: Provenance


def summarise(
    tables: Tables,
    calibration: Calibration,
    config: AuditConfig,
    shape: tuple[int, int],
    source: Source,
    choices: Mapping[str, ChoiceTask],
    suites: Sequence[SuiteResult],
    linear: Sequence[LinearState],
    own: Mapping[str, RowShares],
    suite_ablation: Sequence[SuiteAblation] = (),
) -> tuple[AuditSummary, Columns]:
    """The content of summary.json, and the table of heads; `shape` is `[L, N]`."""
    rows, answers = columns(tables.rows), columns(tables.answers)
    by_head = heads(rows, shape, columns(tables.features))
    control_results = controls(answers, columns(tables.losses), config)
    swept = behaviour(answers, "sweep", config, control_results.unmet)
    ablation = (
        behaviour(answers, "ablation", config, control_results.unmet)
        if config.ablation_heads
        else ()
    )
    summary = AuditSummary(
        model=config.model,
        config=config,
        layers=shape[0],
        heads=shape[1],
        degrees=degrees(rows),
        calibration=calibration,
        controls=control_results,
        prevalence=prevalence(rows, config),
        against_softmax=against_softmax(rows, config),
        bound=bound(rows, config),
        sweep=swept,
        prompts=behaviour(answers, "prompts", config) if config.prompts else (),
        texts=text_losses(columns(tables.text_losses), "texts", one_document=config.one_document)
        if config.text
        else (),
        choices=dict(choices),
        suites=tuple(suites),
        linear=tuple(linear),
        verdicts=verdicts(rows, by_head, swept, control_results.unmet, config, own),
        matched=matched(rows, ranking(by_head)[: config.top_heads], ranking_suite(rows), config),
        ranking_suite=ranking_suite(rows),
        head_types=head_types.composition(by_head, config.top_heads)
        if tables.features.num_rows
        else None,
        ablation=ablation,
        decisiveness=head_sets.decisiveness(ablation),
        suite_ablation=tuple(suite_ablation),
        single_heads=behaviour(answers, head_sets.SINGLE, config, control_results.unmet)
        if config.single_heads
        else (),
        rows=tables.rows.num_rows,
        answers=tables.answers.num_rows,
        **source._asdict(),
    )
    return summary, by_head


def with_head_types(rows: pa.Table, by_head: Columns) -> pa.Table:
    """The rows with one more column, the type of their head."""
    width = int(by_head["head"].max()) + 1
    flat = pc.add(pc.multiply(rows["layer"].cast(pa.int32()), width), rows["head"].cast(pa.int32()))
    types = pa.array(by_head["type"].tolist())
    return rows.append_column("head_type", types.take(flat.combine_chunks()))
