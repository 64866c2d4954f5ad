"""Rows in, shares and heads out: the numbers of a check that no audit has."""

import dataclasses

import numpy as np

from lm_jax import statistics
from polyattn_jax.audit import concentration, summary
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import Columns, degrees, where
from polyattn_jax.audit.results import RowShares, SoftmaxComparison
from polyattn_jax.studies.check.results import HeadRows


def row_findings(
    audited: AuditedModel, rows: Columns, suite: str, degree: float, *, at_zero: bool
) -> tuple[RowShares, SoftmaxComparison | None]:
    """The shares of the rows of one suite that are safe, what the recipe loses and sharpens.

    Rows were measured at b = 0 and at one other bias: the recipe's own, or b_auto where the recipe
    has b = 0 (`at_zero`). Heads are ranked at the other one.
    """
    config = audited.config
    by_head = summary.heads(rows, audited.shape)
    top = summary.ranking(by_head)[: config.top_heads]
    kind = "zero" if at_zero else "auto"
    shares = concentration.row_shares(rows, suite, degree, kind, config, top)
    softmax, softmax_top = (
        concentration.safe_fraction(rows, suite, None, kind, config, heads) for heads in (None, top)
    )
    shares = dataclasses.replace(shares, softmax=softmax, softmax_top=softmax_top)
    compared = concentration.against_softmax(where(rows, suite=suite, bias_kind=kind), config)
    against = next((entry for entry in compared if entry.p == degree), None)
    return shares, against


def unsafe(safe: RowShares) -> RowShares:
    """The shares of rows that are not safe, from those of rows that are."""
    names = ("recipe", "recipe_top", "softmax", "softmax_top")
    return dataclasses.replace(safe, **{name: _complement(getattr(safe, name)) for name in names})


def _complement(safe: statistics.Interval | None) -> statistics.Interval | None:
    """The share of rows that are not safe, from the share of those that are."""
    if safe is None:
        return None
    return statistics.Interval(1.0 - safe.estimate, 1.0 - safe.high, 1.0 - safe.low, safe.n)


def by_head(rows: Columns) -> tuple[HeadRows, ...]:
    """The argmax rows of every head, by bias, layer and head."""
    results = []
    for suite, kind in concentration.cells(rows):
        c = concentration.with_target(where(rows, suite=suite, bias_kind=kind, target="argmax"))
        concentrated = ~concentration.softmax_unsafe(c).computed
        lost = {str(p): concentrated & concentration.unsafe(c, p).computed for p in degrees(c)}
        layer, head = c["layer"].astype(int), c["head"].astype(int)
        for place in sorted(set(zip(layer.tolist(), head.tolist(), strict=True))):
            own = (layer == place[0]) & (head == place[1])
            results.append(
                HeadRows(
                    layer=place[0],
                    head=place[1],
                    bias_kind=kind,
                    rows=int(own.sum()),
                    concentrated=int(concentrated[own].sum()),
                    s_softmax=float(np.median(c["s_softmax"][own])),
                    s={str(p): float(np.median(c[f"s_{p}"][own])) for p in degrees(c)},
                    lost={name: int(member[own].sum()) for name, member in lost.items()},
                )
            )
    return tuple(results)
