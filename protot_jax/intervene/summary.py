"""The numbers of an intervention: `intervention.json`, and the rows of `interventions.parquet`.

`schema.py` says what each field means.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats

from protot_jax.intervene.effects import MODES, REINITIALISE, Measured
from protot_jax.intervene.gates import Ranked
from protot_jax.intervene.schema import ROWS
from protot_jax.intervene.sentences import occurrences

# Of the ranking, and of the strongest controls.
SHOWN = 10


def mean_interval(values: np.ndarray) -> dict[str, Any]:
    """Mean, Student's 95 % interval of it (None for one value, or none), and n."""
    n = len(values)
    if n < 2:
        return {"mean": float(values[0]) if n else None, "low": None, "high": None, "n": n}
    mean = float(values.mean())
    # Equal values have an interval of no width, for which scipy has only NaN.
    reach = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)
    return {"mean": mean, "low": mean - float(reach), "high": mean + float(reach), "n": n}


def of_mode(measured: Measured, mode: str) -> dict[str, Any]:
    """Effect of one intervention, and where it stands among those on other prototypes."""
    own = measured.layer, measured.prototype
    kept_N = measured.kept_N
    change_DN = measured.change(mode)[own]
    loss_DN = measured.perplexity_change(mode)[own]
    text = None
    if measured.text is not None:
        found = measured.text.change[mode]
        text = {"mean": found.estimate, "low": found.low, "high": found.high, "n": found.n}
    return {
        "mode": mode,
        "effect": mean_interval(change_DN.mean(0)[kept_N]),
        "sentences": [mean_interval(change_D) for change_D in change_DN.T],
        "sentence_perplexity": mean_interval(loss_DN.mean(0)[kept_N]),
        "text_perplexity": text,
        "control": control(measured, mode),
    }


def control(measured: Measured, mode: str) -> dict[str, Any] | None:
    """The chosen prototype's effect among those of all others; None if there is nothing to rank."""
    if not measured.kept_N.any():
        return None
    effect_LR = measured.effects(mode)
    own = measured.layer, measured.prototype
    others = np.ones(effect_LR.shape, bool)
    others[own] = False
    others &= np.isfinite(effect_LR)
    values, chosen = effect_LR[others], float(effect_LR[own])
    if not values.size:
        return None
    strongest = sorted(zip(values.tolist(), np.argwhere(others).tolist(), strict=True))
    return {
        "chosen": chosen,
        "percentile": float(stats.percentileofscore(values, chosen, kind="mean")),
        "p_drop": float((1 + (values <= chosen).sum()) / (1 + values.size)),
        "n": int(values.size),
        "mean": float(values.mean()),
        "low": float(np.quantile(values, 0.025)),
        "high": float(np.quantile(values, 0.975)),
        "effects": effect_LR.tolist(),
        "strongest": [
            {"layer": layer, "prototype": prototype, "effect": effect}
            for effect, (layer, prototype) in strongest[:SHOWN]
        ],
    }


def of_seed(measured: Measured) -> dict[str, Any]:
    """Everything measured on one model."""
    kept_N = measured.kept_N
    tokens_N = measured.cases.target_NT.sum(1)
    text = measured.text
    return {
        "layer": measured.layer,
        "prototype": measured.prototype,
        "sentences": [
            {
                "concept": sentence.concept,
                "target": sentence.target,
                "text": sentence.text,
                "where": sentence.where,
                "earlier": len(occurrences(sentence.text, sentence.target)) - 1,
                "target_tokens": int(tokens),
                "baseline": float(baseline),
                "perplexity": float(np.exp(loss)),
                "kept": bool(kept),
            }
            for sentence, tokens, baseline, loss, kept in zip(
                measured.cases.sentences,
                tokens_N,
                measured.baseline_N,
                measured.baseline_loss_N,
                kept_N,
                strict=True,
            )
        ],
        "kept": int(kept_N.sum()),
        "excluded": int((~kept_N).sum()),
        "text": None if text is None else {"perplexity": text.perplexity, "tokens": text.tokens},
        "modes": [of_mode(measured, mode) for mode in MODES],
    }


def first(ranking: Sequence[Ranked]) -> list[dict[str, Any]]:
    """The head of a ranking."""
    return [dataclasses.asdict(one) for one in ranking[:SHOWN]]


def place(ranking: Sequence[Ranked], layer: int, prototype: int) -> int | None:
    """Where a prototype stands in a ranking, from 1 on; None without one."""
    order = [(one.layer, one.prototype) for one in ranking]
    return order.index((layer, prototype)) + 1 if order else None


def skipped(measured: Measured) -> list[dict[str, str]]:
    """The sentences that were no case, each with the reason."""
    return [
        {"where": one.sentence.where, "target": one.sentence.target, "reason": one.reason}
        for one in measured.cases.skipped
    ]


def rows(measured: Measured, *, run: str, seed: int) -> pa.Table:
    """A row for each sentence, prototype, intervention and draw that was measured."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ROWS.names}
    sentences = measured.cases.sentences
    for mode in MODES:
        probability = measured.probability[mode]
        layer, prototype, draw, n = np.nonzero(np.isfinite(probability))
        at = layer, prototype, draw, n
        made = {
            "run": np.full(len(n), run),
            "seed": np.full(len(n), seed),
            "concept": np.array([s.concept for s in sentences])[n],
            "target": np.array([s.target for s in sentences])[n],
            "sentence": n,
            "layer": layer,
            "prototype": prototype,
            "chosen": (layer == measured.layer) & (prototype == measured.prototype),
            "mode": np.full(len(n), mode),
            "draw": draw if mode == REINITIALISE else np.full(len(n), -1),
            "kept": measured.kept_N[n],
            "baseline": measured.baseline_N[n],
            "probability": probability[at],
            "change": measured.change(mode)[at],
            "perplexity": np.exp(measured.loss[mode][at]),
            "perplexity_change": measured.perplexity_change(mode)[at],
        }
        for name, column in made.items():
            columns[name].append(column)
    return pa.table({name: np.concatenate(parts) for name, parts in columns.items()}, schema=ROWS)
