"""Concept reports without a model: valid by the schema, seeded, of any size."""

import dataclasses
from typing import Any

import numpy as np

from lm_jax.run.results import parse_result
from protot_jax.studies.concepts import results
from protot_jax.studies.concepts.results import ConceptReport, LayerIntervals

_SPEECH = """
the people of a nation ask that its government keep faith with them and so we meet in this
house to speak of peace , labour , taxes , harvest , commerce and the constitution . during
the winter from 1861 until 1865 war had come ; now women , children and soldiers who return
need bread , schools , roads and a telegraph before the next session of congress begins
"""
WORDS = _SPEECH.split()
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- & &amp; \u2028",
    "line\nend",
    "https://example.org/x.js",
)
THEMES = ("dates and spans of time", "legal duty", "commas before a clause", "war and its end")
LAGS = range(-5, 6)


def build(
    layers: int = 2,
    prototypes: int = 4,
    *,
    texts: int = 8,
    length: int = 14,
    top: int = 3,
    judge: str = "cached:answers.jsonl",
    hostile: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """What `summary.json` holds.

    The last prototype of every layer is dead and has no half-life; every third one has no label.
    `hostile` puts markup and worse into words, tokens, themes and the name of the corpus.
    """
    rng = np.random.default_rng(seed)
    all_texts = [_text(rng, i, length, hostile and i == 0) for i in range(texts)]
    drawn = np.random.default_rng([seed, 1])
    entries = [
        _prototype(rng, layer, i, all_texts, top, dead=i == prototypes - 1, judged=judge != "null")
        for layer in range(layers)
        for i in range(prototypes)
    ]
    for each in entries:
        _ablate(drawn, each, all_texts, prototypes, (layers, prototypes))
    if hostile:
        entries[0]["top_tokens"] = [
            {"token": word, "id": i, "mean": 0.5, "sum": 1.0, "count": 2}
            for i, word in enumerate(HOSTILE)
        ]
        entries[0]["label"] = _label(rng, HOSTILE[0] + HOSTILE[1])
        entries[0]["top_texts"] = [_top_text(rng, 0, length, 0.5)]
    statistic = {
        "value": -0.2192,
        "low": -0.31,
        "high": -0.12,
        "p": 0.0031,
        "prototypes": layers * prototypes,
        "texts": texts,
    }
    baseline = [
        {"texts": [int(i) for i in rng.integers(texts, size=top)], "label": _label(rng, "nothing")}
        for _ in range(8)
    ]
    return {
        "schema": results.NAME,
        "version": results.VERSION,
        "model": {
            "seed": seed,
            "step": 1200,
            "layers": layers,
            "prototypes": prototypes,
            "hidden_size": 128,
            "context": 256,
            "vocab_size": 4000,
            "parameters": 2_345_678,
            "shared_routing": True,
            "corpus": HOSTILE[1] if hostile else "speeches",
            "perplexity": 57.3,
            "heads": 1,
        },
        "settings": {
            "split": "validation",
            "texts": texts,
            "length": length,
            "tokens": texts * length,
            "top": top,
            "rank_by": "mean",
            "judge": judge,
            "resamples": 1000,
            "seed": seed,
        },
        "texts": all_texts,
        "layers": [
            {"layer": i, "write": _layer_gate(rng, i, layers), "read": _layer_gate(rng, i, layers)}
            for i in range(layers)
        ],
        "prototypes": entries,
        "half_life_repetition": {
            "spearman": statistic,
            "cohens_d": {**statistic, "value": 0.825, "p": None, "low": 0.4, "high": 1.2},
            "overall_spearman": -0.4571,
            "overall_cohens_d": 1.731,
            "quartiles": [0.406, 0.3429, 0.4017, 0.2695],
            "edges": [7.8, 10.1, 13.4],
        },
        "lag": {
            "lags": list(LAGS),
            "mean": [_short(0.1 + 0.25 * np.exp(-((lag + 1) ** 2))) for lag in LAGS],
            "lead": {**statistic, "value": 0.14, "p": 0.001, "low": 0.1, "high": 0.18},
            "own_lead": {**statistic, "value": 0.021, "p": 0.38, "low": -0.03, "high": 0.07},
            "peaks_one_before": 0.62,
        },
        "baseline": None if judge == "null" else baseline,
        "comparisons": [],
    }


def typed(content: dict[str, Any]) -> ConceptReport:
    """What `build` returned as its dataclass."""
    return parse_result(content, ConceptReport)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _text(rng: np.random.Generator, document: int, length: int, hostile: bool) -> dict[str, Any]:
    start = int(rng.integers(len(WORDS)))
    # Words of one or two tokens, cut to the length that was asked for.
    words, word_of = [], []
    while len(word_of) < length:
        place = len(words)
        bare = HOSTILE[place] if hostile and place < len(HOSTILE) else WORDS[(start + place) % 60]
        words.append(bare if place == 0 else f" {bare}")
        word_of += [place] * min(1 + (len(bare) > 6), length - len(word_of))
    tokens = []
    for place, word in enumerate(words):
        count = word_of.count(place)
        tokens += [word] if count == 1 else [word[:5], word[5:]]
    return {
        "document": document,
        "tokens": tokens,
        "words": words,
        "word_of": word_of,
        "perplexity": _short(rng.lognormal(4, 0.4)),
        "carried": None,
    }


def _ablate(
    rng: np.random.Generator,
    prototype: dict[str, Any],
    texts: list[dict[str, Any]],
    prototypes: int,
    shape: tuple[int, int],
) -> None:
    """The first two of a prototype's texts without it, and what is carried to their tokens."""
    tops = prototype["top_texts"][:2]
    for top in tops:
        text = texts[top["text"]]
        T = len(text["tokens"])
        top["ablated"] = [None, *np.round(rng.normal(-0.01, 0.1, T - 1), 4).tolist()]
        if text["carried"] is None:
            text["carried"] = _carried(rng, T, shape)
    if tops:
        changes = [change for top in tops for change in top["ablated"][1:]]
        prototype["ablation"] = {
            "change": float(np.mean(changes)),
            "harm_percentile": 62.5,
            "controls": prototypes - 1,
            "texts": len(tops),
        }


def _carried(rng: np.random.Generator, T: int, shape: tuple[int, int]) -> dict[str, Any]:
    K = min(3, shape[0] * shape[1])

    def rows(draw: Any) -> list[list]:
        return [[], *(draw(i) for i in range(1, T))]

    return {
        "layer": rows(lambda i: rng.integers(shape[0], size=K).tolist()),
        "prototype": rows(lambda i: rng.integers(shape[1], size=K).tolist()),
        "logit": rows(lambda i: np.round(rng.normal(0, 1, K), 3).tolist()),
        "source": rows(lambda i: rng.integers(-1, i, size=K).tolist()),
        "part": rows(lambda i: np.round(rng.normal(0, 1, K), 3).tolist()),
    }


def _top_text(rng: np.random.Generator, text: int, length: int, level: float) -> dict[str, Any]:
    write = np.clip(level * rng.beta(0.4, 1.2, length) * 2, 0, 1)
    memory = np.convolve(write, 0.2 * 0.8 ** np.arange(length))[: length - 1]
    gates = {"write": write, "read": np.roll(write, -1), "memory": np.concatenate([[0], memory])}
    return {
        "text": text,
        "mean": _short(write.mean()),
        "sum": _short(write.sum()),
        **{name: np.round(gate, 5).tolist() for name, gate in gates.items()},
        "ablated": [],
    }


def _gate(rng: np.random.Generator, dead: bool) -> dict[str, Any]:
    undefined = ("peak_over_mean", "mutual_information", "mutual_information_by_chance")
    if dead:
        return dict.fromkeys(("mean", "max", "top_1", "active"), 0.0) | dict.fromkeys(undefined)
    mean = rng.uniform(0.01, 0.2)
    found = {
        "mean": mean,
        "max": 0.97,
        "peak_over_mean": 0.97 / mean,
        "mutual_information": rng.uniform(0.05, 1.4),
        "mutual_information_by_chance": rng.uniform(0.01, 0.2),
        "top_1": mean * 0.8,
        "active": rng.uniform(0.2, 0.9),
    }
    return {name: _short(value) for name, value in found.items()}


def _layer_gate(rng: np.random.Generator, layer: int, layers: int) -> dict[str, Any]:
    depth = (layer + 1) / layers
    means = {
        "l1_ratio": _short(4 + 8 * depth),
        "gini": _short(0.5 + 0.4 * depth),
        "entropy": _short(2.4 - depth),
        "usage_gini": _short(0.3 + 0.2 * depth),
        "mutual_information": _short(rng.uniform(0.2, 0.9)),
        "mutual_information_by_chance": _short(0.1 + 0.05 * depth),
        "top_1": _short(0.3 + 0.4 * depth),
        "margin": _short(0.1 + 0.3 * depth),
        "active": _short(12 - 6 * depth),
        "max_share": _short(rng.uniform(0.1, 0.3)),
        "dead": 1,
    }
    ends = {
        each.name: [_short(0.95 * means[each.name]), _short(1.04 * means[each.name])]
        for each in dataclasses.fields(LayerIntervals)
    }
    return {**means, "intervals": ends}


def _label(rng: np.random.Generator, theme: str) -> dict[str, Any]:
    return {
        "theme": theme,
        "disentanglement": int(rng.integers(3, 11)),
        "coverage": int(rng.integers(3, 11)),
        "themes": int(rng.integers(1, 6)),
        "explanation": f"Nearly all of the marked words belong to {theme}.",
    }


def _prototype(
    rng: np.random.Generator,
    layer: int,
    number: int,
    texts: list[dict[str, Any]],
    top: int,
    *,
    dead: bool,
    judged: bool,
) -> dict[str, Any]:
    half_life = _short(rng.lognormal(1.8, 1.2))
    correlation = [_short(0.1 + 0.3 * np.exp(-((lag + 1) ** 2))) for lag in LAGS]
    picks = rng.choice(len(texts), size=min(top, len(texts)), replace=False)
    levels = np.sort(rng.uniform(0.1, 0.9, picks.size))[::-1]
    top_entries = [
        _top_text(rng, int(i), len(texts[i]["tokens"]), level)
        for i, level in zip(picks, levels, strict=True)
    ]
    labelled = judged and not dead and (layer + number) % 3 != 2
    tokens = [
        {
            "token": word,
            "id": i,
            "mean": _short(0.9 / (i + 1)),
            "sum": _short(9 / (i + 1)),
            "count": 9,
        }
        for i, word in enumerate(rng.choice(WORDS, 8, replace=False).tolist())
    ]
    return {
        "layer": layer,
        "prototype": number,
        "decay": 1.0 if dead else _short(0.5 ** (1 / half_life)),
        "half_life": None if dead else half_life,
        "write": _gate(rng, dead),
        "read": _gate(rng, dead),
        "repetition": None if dead else _short(rng.uniform(0.1, 0.8)),
        "lag": None if dead else -1,
        "cross_correlation": [None] * len(LAGS) if dead else correlation,
        "top_tokens": [] if dead else tokens,
        "top_texts": [] if dead else top_entries,
        "label": _label(rng, THEMES[(layer + number) % len(THEMES)]) if labelled else None,
        "ablation": None,
    }
