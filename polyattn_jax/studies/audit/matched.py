"""The matched diagnostic: what S_p says of the very rows whose prompts are answered.

"When Does Polynomial Attention Concentrate?", Tables 5 and 12 (the target is the row's argmax; over
all heads, over a fixed set of heads and over one ranked for the recipe) and Table 14 (the target is
the key that holds the answer, which may have no weight at all).
"""

import numpy as np

from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns, take, where
from polyattn_jax.audit.concentration import (
    Rows,
    dead_share,
    decided_share,
    of_heads,
    share,
    unsafe,
    with_target,
)
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import MatchedSafety, SafeShares
from polyattn_jax.recipes.diagnostic import Status


def matched(
    rows: Columns, top: np.ndarray, ranking_suite: str, config: AuditConfig
) -> tuple[MatchedSafety, ...]:
    """The matched diagnostic of every recipe of the sweep that is a normalised power.

    Args:
      rows: columns of `rows.parquet`.
      top: flat numbers of the heads of highest median S_2.
      ranking_suite: the suite whose rows rank the heads.
      config: settings of the audit.
    """
    width = int(rows["head"].max()) + 1
    results = []
    for recipe in config.by_name.values():
        p, kind = recipe.degree, recipe.bias_kind
        if p is None:
            continue
        own = where(rows, suite=config.probe, bias_kind=kind)
        best = where(own, target="argmax")
        ranked = where(rows, suite=ranking_suite, bias_kind=kind, target="argmax")
        own_top = head_ranking(ranked, p, width)[: config.top_heads]
        fixed = of_heads(best, top, width)
        fixed_active = where(fixed, status=int(Status.ACTIVE))
        answer = where(own, target="answer")
        hit = take(answer, answer["argmax"] == answer["answer"])
        some = len(answer["status"]) > 0
        results.append(
            MatchedSafety(
                recipe=recipe.name,
                bias_kind=kind,
                p=p,
                all=safe_shares(best, p, config),
                top=safe_shares(fixed, p, config),
                own_top=safe_shares(of_heads(best, own_top, width), p, config),
                top_false_negative=int(
                    np.sum((fixed_active["p_star"] <= p) & unsafe(fixed_active, p).sure)
                ),
                answer_is_argmax=_share(answer["argmax"] == answer["answer"], answer, config)
                if some
                else None,
                answer_dead=_share(answer["status"] == Status.DEAD, answer, config)
                if some
                else None,
                answer=safe_shares(answer, p, config),
                answer_argmax=safe_shares(hit, p, config),
                answer_argmax_top=safe_shares(of_heads(hit, top, width), p, config),
            )
        )
    return tuple(results)


def head_ranking(c: Columns, p: float, width: int) -> np.ndarray:
    """Flat head numbers by the median S_p of their active rows, highest first.

    A head without an active row comes first; ties by layer and head.
    """
    active = c["status"] == Status.ACTIVE
    flat = c["layer"].astype(int) * width + c["head"]
    heads = np.unique(flat)
    own = ((flat == head) & active for head in heads)
    medians = np.array([np.median(c[f"s_{p}"][rows]) if rows.any() else np.inf for rows in own])
    return heads[np.argsort(-medians, kind="stable")]


def safe_shares(c: Columns, p: int | float, config: AuditConfig) -> SafeShares:
    """Safety of the active rows of `c`, measured and predicted, and the share of dead rows."""
    dead = dead_share(with_target(c), config)
    active = where(c, status=int(Status.ACTIVE))
    if not len(active["status"]):
        return SafeShares(None, None, 0, dead)
    measured: Rows = ~unsafe(active, p)
    return SafeShares(
        measured=decided_share(measured, active["prompt"], config),
        predicted=_share(active["p_star"] <= p, active, config),
        rows=len(active["status"]),
        dead=dead,
    )


def _share(hit: np.ndarray, c: Columns, config: AuditConfig) -> Interval:
    return share(hit.astype(float), c["prompt"], config)
