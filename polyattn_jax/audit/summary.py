"""The summary of an audit, computed from its parquet tables: every number of the report.

Rates over rows are in `concentration.py`. Accuracies carry Wilson intervals, differences between
recipes a paired exact test.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax import statistics
from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from polyattn_jax.audit import decision, head_sets, head_types
from polyattn_jax.audit.columns import Columns, columns, degrees, take, where
from polyattn_jax.audit.concentration import (
    Rows,
    against_softmax,
    cells,
    clusters,
    dead_fraction,
    decided_share,
    prevalence,
    safe_fraction,
    share,
    unsafe,
)
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.matched import matched
from polyattn_jax.audit.provenance import Provenance
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
    TextLoss,
)
from polyattn_jax.audit.suite_results import SuiteResult
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.recipes.linear_state import LinearState
from polyattn_jax.recipes.row_maps import SOFTMAX

EPSILON = 1e-6


# Rows


def bound(rows: Columns, config: AuditConfig) -> tuple[BoundAgreement, ...]:
    """Predicted (p >= p*) against measured (S_p < 1) safety per suite, bias and degree (Table 8).

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


def heads(rows: Columns, shape: tuple[int, int], features: Columns | None = None) -> Columns:
    """One row per head: medians over active rows of induction at b_auto, rank, features and type.

    A head without any active row there would write zeros if substituted; its median S_2 is taken as
    infinite and it ranks first. Without `features`, the rows of `schema.FEATURES`, those columns
    are NaN and every type is unknown: no other quantity takes their place.
    """
    L, N = shape
    powers = degrees(rows)
    c = where(rows, suite=ranking_suite(rows), bias_kind="auto", target="argmax")
    flat = c["layer"].astype(int) * N + c["head"]
    out: dict[str, list[Any]] = {}
    for head in range(L * N):
        own = take(c, flat == head)
        active = take(own, own["status"] == Status.ACTIVE)
        some = len(active["s_2"]) > 0
        entry: dict[str, Any] = {
            "layer": head // N,
            "head": head % N,
            "active_rows": len(active["s_2"]),
            "window": int(own["window"][0]),
            **{f"s_{p}": float(np.median(active[f"s_{p}"])) if some else np.inf for p in powers},
            "s_softmax": float(np.median(own["s_softmax"])),
            **{f"change_{p}": float(np.median(own[f"change_{p}"])) for p in powers},
            "relative_margin": float(np.median(active["relative_margin"])) if some else np.nan,
            "active": float(np.median(active["active"])) if some else np.nan,
        }
        for key, value in entry.items():
            out.setdefault(key, []).append(value)
    by_head = {key: np.array(values) for key, values in out.items()}
    by_head |= head_types.averages(features, shape)
    by_head["type"] = np.array(
        [
            head_types.head_type({name: by_head[name][head] for name in head_types.FEATURES})
            for head in range(L * N)
        ]
    )
    by_head["rank"] = np.empty(L * N, int)
    by_head["rank"][ranking(by_head)] = np.arange(L * N)
    return by_head


def ranking_suite(rows: Columns) -> str:
    """The suite whose rows rank the heads: induction, or the first where it is left out."""
    return "induction" if "induction" in rows["suite"] else str(rows["suite"][0])


def ranking(by_head: Columns) -> np.ndarray:
    """Flat head numbers by median S_2, highest first; ties by layer and head."""
    return np.argsort(-by_head["s_2"], kind="stable")


# Answers


def accuracy(answers: Columns) -> statistics.Interval:
    """Share of prompts whose greedy next token is the target, with its Wilson interval."""
    correct = answers["predicted"] == answers["target"]
    return statistics.wilson(int(correct.sum()), len(correct))


def controls(answers: Columns, losses: Columns, config: AuditConfig) -> Controls:
    """What softmax does on the control prompts."""
    c = where(answers, stage="control")
    by_suite = {suite: accuracy(where(c, suite=suite)) for suite in dict.fromkeys(c["suite"])}
    first, second = (_copy_result(where(losses, copy=copy), config) for copy in (1, 2))
    unmet = decision.unmet_controls(
        by_suite[f"niah_{config.sweep_length}"],
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


def behaviour(
    answers: Columns, stage: str, config: AuditConfig, unmet: Sequence[str] = ()
) -> tuple[ConditionResult, ...]:
    """Accuracy of every condition of a stage, and its verdict against softmax.

    With any control `unmet` every verdict is "undecided".
    """
    c = where(answers, stage=stage)
    base = _by_prompt(where(c, cell=SOFTMAX.name))
    results = []
    for name in dict.fromkeys(c["cell"]):
        own = where(c, cell=name)
        correct = _by_prompt(own)
        before, after = ([right[k] for k in base] for right in (base, correct))
        decided = decision.verdict(before, after, tolerance=config.tolerance)
        lost = sum(was and not now for was, now in zip(before, after, strict=True))
        results.append(
            ConditionResult(
                cell=name,
                recipe=str(own["recipe"][0]),
                bias=float(own["bias"][0]),
                heads=int(own["heads"][0]),
                accuracy=accuracy(own),
                verdict="undecided" if unmet else decided.name,
                delta=statistics.Interval(decided.change, decided.low, decided.high, len(base)),
                p_value=decided.p,
                lost=lost,
                won=lost + sum(after) - sum(before),
                loss=float(own["loss"].mean()),
                median_rank=float(np.median(own["rank"])),
                dead_rows_per_prompt=float(own["dead_rows"].mean()),
            )
        )
    return tuple(results)


def text_losses(losses: Columns, stage: str, *, one_document: bool = False) -> tuple[TextLoss, ...]:
    """The loss of every condition of a stage on texts, and its change against softmax.

    Intervals are Student's over texts, since a bootstrap of few texts is too narrow: of 2, 6 and 12
    texts its 95 % interval covered 50, 88 and 90 % of normal changes. Windows of one document are
    one text, of which there is no interval.
    """
    c = where(losses, stage=stage)
    base = where(c, cell=SOFTMAX.name)
    before = dict(zip(base["prompt"], base["loss"].astype(np.float64), strict=True))
    results = []
    for name in dict.fromkeys(c["cell"]):
        own = where(c, cell=name)
        loss, predicted = own["loss"].astype(np.float64), own["length"] - 1
        change = loss - [before[text] for text in own["prompt"]]

        # A text counts by its tokens.
        def mean(
            values: np.ndarray,
            span: tuple[float, float],
            predicted: np.ndarray = predicted,
        ) -> LossInterval:
            if not np.isfinite(values).all():
                return LossInterval(math.nan, *span, len(values))
            if len(values) == 1 or one_document:
                return LossInterval(float(np.average(values, weights=predicted)), *span, 1)
            interval = statistics.student_interval(values, weights=predicted)
            low = max(interval.low, span[0])
            return LossInterval(interval.estimate, low, interval.high, interval.n)

        mean_loss, mean_change = mean(loss, (0.0, math.inf)), mean(change, (-math.inf, math.inf))
        results.append(
            TextLoss(
                cell=name,
                recipe=str(own["recipe"][0]),
                bias=float(own["bias"][0]),
                heads=int(own["heads"][0]),
                loss=mean_loss,
                change=mean_change,
                perplexity=_exp(mean_loss),
                perplexity_ratio=_exp(mean_change),
                tokens=int(predicted.sum()),
                dead_rows_per_text=float(own["dead_rows"].mean()),
            )
        )
    return tuple(results)


def _exp(loss: LossInterval) -> LossInterval:
    """The exponential of an interval, inf where it overflows."""
    with np.errstate(over="ignore"):
        estimate, low, high = np.exp([loss.estimate, loss.low, loss.high]).tolist()
    return LossInterval(estimate, low, high, loss.n)


def _by_prompt(answers: Columns) -> dict[tuple[str, str], bool]:
    correct = answers["predicted"] == answers["target"]
    keys = zip(answers["suite"], answers["prompt"], strict=True)
    return dict(zip(keys, map(bool, correct), strict=True))


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
    top, suite = ranking(by_head)[: config.top_heads], f"niah_{config.sweep_length}"
    results = []
    for entry in swept:
        if entry is base:
            continue
        recipe = config.by_name[entry.recipe]
        safe, top_safe, unmeasured = None, None, recipe.unmeasured
        dead: tuple[statistics.Interval | None, ...] = (None, None)
        if recipe.degree is not None:
            args = (rows, suite, recipe.degree, recipe.bias_kind, config)
            safe, top_safe = safe_fraction(*args, None), safe_fraction(*args, top)
            place = (rows, suite, recipe.bias_kind, config)
            dead = (dead_fraction(*place, None), dead_fraction(*place, top))
            unmeasured = "no row has a target"
        elif recipe.name in own:
            safe, top_safe = own[recipe.name].recipe, own[recipe.name].recipe_top
            dead = (own[recipe.name].dead, own[recipe.name].dead_top)
        results.append(
            decision.explain(
                entry,
                base,
                safe,
                top_safe,
                unmeasured=unmeasured,
                tolerance=config.tolerance,
                ablated=bool(config.ablation_heads),
                unmet=unmet,
                dead=dead,
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
