"""What a concept report is made of: `concepts.json`, the page's data, described as JSON Schema.

The page `concepts.html` shows this file and computes nothing that it does not hold. Version 1: a
reader refuses another one; a field that is added keeps the version, a change of meaning raises it.

Lists that go by token have one entry per token of their text, by word one per word. `write`, `read`
and `memory` of a shown text go by token; a word has the mean of its tokens. `write` and `read` are
gates, between 0 and 1. `memory` is how much of the recent writing went to the prototype,
(1 - beta) sum_{j<i} beta^(i-1-j) write_j: the discounted mean of its write gate strictly before a
token, what the next read finds. The marks at the ends of a document (`<bos>`, `<eos>`, `<eot>`) are
read by the model, but are in no text and no statistic here.
"""

from collections.abc import Mapping
from typing import Any

VERSION = 1
NAME = "protot_jax.concepts"

_NUMBER = {"type": "number"}
_MAYBE = {"type": ["number", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_GATES = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object with these fields, all of them, and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(item)}


# A statistic with what it rests on; `p` is two-sided, `low` and `high` bound 95 %.
_TESTED = {"value": _MAYBE, "p": _MAYBE, "low": _MAYBE, "high": _MAYBE, "n": _COUNT}

# Gate statistics of one prototype over all analysed tokens (spec rows PT-66..69, 71).
_GATE = _closed(
    {
        "mean": _NUMBER,
        "max": _NUMBER,
        # Largest over mean; null where it is never open.
        "l1_ratio": _MAYBE,
        # Mutual information between token and gate in 10 quantile bins, in nats, Miller-Madow.
        "mutual_information": _MAYBE,
        # Share of tokens where this prototype has the largest gate, and where its gate is >= 0.01.
        "top_1": _NUMBER,
        "active": _NUMBER,
    }
)

# The same of a layer, over its prototypes.
_LAYER_GATE = _closed(
    {
        # Means over tokens of Eq. 3, 4 and 5 (nats); Gini of the prototypes' shares of the writing,
        # which is that of Table 15.
        "l1_ratio": _NUMBER,
        "gini": _NUMBER,
        "entropy": _NUMBER,
        "usage_gini": _NUMBER,
        # Mean over prototypes, and with tokens shuffled: what a small sample gives by chance.
        "mutual_information": _MAYBE,
        "mutual_information_by_chance": _MAYBE,
        # Mean over tokens of the largest gate, and of its lead over the second.
        "top_1": _NUMBER,
        "margin": _NUMBER,
        # Mean number of prototypes with a gate >= 0.01, largest share of the writing, and how many
        # never have a gate >= 0.01.
        "active": _NUMBER,
        "max_share": _NUMBER,
        "dead": _COUNT,
    }
)

# A judge's view of one prototype (PT-61). `null` judges give no label at all.
_LABEL = _closed(
    {
        "theme": _TEXT,
        "disentanglement": _NUMBER,
        "coverage": _NUMBER,
        "themes": _COUNT,
        "explanation": _TEXT,
    }
)

_SHOWN = _closed(
    {
        # An index into `texts`.
        "text": _COUNT,
        "mean": _NUMBER,
        "sum": _NUMBER,
        "write": _GATES,
        "read": _GATES,
        "memory": _GATES,
    }
)

_PROTOTYPE = _closed(
    {
        "layer": _COUNT,
        "prototype": _COUNT,
        "decay": _NUMBER,
        # In tokens; null where the decay has rounded to 1.
        "half_life": _MAYBE,
        "write": _GATE,
        "read": _GATE,
        # 1 - unique / all of the tokens it writes most.
        "repetition": _MAYBE,
        # Cross-correlation of read with write at lags -5..5; `lag` is where it peaks, and below 0
        # where reading comes before writing.
        "lag": {"type": ["integer", "null"]},
        "cross_correlation": _list(_MAYBE),
        "top_tokens": _list(
            _closed(
                {"token": _TEXT, "id": _COUNT, "mean": _NUMBER, "sum": _NUMBER, "count": _COUNT}
            )
        ),
        "top_texts": _list(_SHOWN),
        "label": {"anyOf": [_LABEL, {"type": "null"}]},
    }
)

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Concept report of a Prototype Transformer",
    **_closed(
        {
            "schema": {"const": NAME},
            "version": {"const": VERSION},
            "model": _closed(
                {
                    "seed": _COUNT,
                    "step": _COUNT,
                    "layers": _COUNT,
                    "prototypes": _COUNT,
                    "hidden_size": _COUNT,
                    "context": _COUNT,
                    "vocab_size": _COUNT,
                    "parameters": _COUNT,
                    "shared_routing": {"type": "boolean"},
                    "corpus": _TEXT,
                    # Of the analysed texts themselves.
                    "perplexity": _NUMBER,
                }
            ),
            # What was asked for, and how much text there was.
            "settings": _closed(
                {
                    "split": _TEXT,
                    "texts": _COUNT,
                    "length": _COUNT,
                    "tokens": _COUNT,
                    "top": _COUNT,
                    "rank_by": {"enum": ["mean", "sum"]},
                    "judge": _TEXT,
                    "permutations": _COUNT,
                    "seed": _COUNT,
                }
            ),
            "texts": _list(
                _closed(
                    {
                        "document": _COUNT,
                        "tokens": _list(_TEXT),
                        # As many pieces as words; joined by nothing they give the text back.
                        "words": _list(_TEXT),
                        # Which word each token is of.
                        "word_of": _list(_COUNT),
                        "perplexity": _NUMBER,
                    }
                )
            ),
            "layers": _list(_closed({"layer": _COUNT, "write": _LAYER_GATE, "read": _LAYER_GATE})),
            "prototypes": _list(_PROTOTYPE),
            "half_life_repetition": _closed(
                {
                    # Spearman's correlation; mean repetition by quartile of half-life, short first;
                    # Cohen's d of the first against the last quartile.
                    "spearman": _closed(_TESTED),
                    "quartiles": _list(_MAYBE),
                    "cohens_d": _closed(_TESTED),
                }
            ),
            "lag": _closed(
                {
                    "lags": _list({"type": "integer"}),
                    # Mean cross-correlation over prototypes at each lag.
                    "mean": _list(_MAYBE),
                    # Mean correlation at lag -1 less that at lag 0, and a test in which the read
                    # gates of a layer change owners.
                    "lead": _closed(_TESTED),
                    # Share of prototypes whose peak is at lag -1.
                    "peaks_one_before": _MAYBE,
                }
            ),
            # The same judge over random texts in place of top texts (PT-64).
            "baseline": {
                "anyOf": [
                    {"type": "null"},
                    _list(
                        _closed(
                            {"texts": _list(_COUNT), "label": {"anyOf": [_LABEL, {"type": "null"}]}}
                        )
                    ),
                ]
            },
        }
    ),
}
