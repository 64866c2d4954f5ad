"""Heads, conditions and losses, computed from the tables of an audit or a check.

Rates over rows are in `concentration.py`. Accuracies carry Wilson intervals, differences between
recipes a paired exact test.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from lm_jax import statistics
from polyattn_jax.audit import decision, head_types
from polyattn_jax.audit.columns import Columns, degrees, take, where
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import ConditionResult, LossInterval, TextLoss
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.recipes.row_maps import SOFTMAX

# Rows


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
