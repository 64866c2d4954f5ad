"""What a concept report is made of: `concepts.json`, the page's data, described as JSON Schema.

The page `concepts.html` shows this file and computes nothing that it does not hold. Version 2: a
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

from protot_jax.json_schema import COUNT, DRAFT, MAYBE, NUMBER, TEXT, TRUTH, closed, listed, or_null

VERSION = 2
NAME = "protot_jax.concepts"

_GATES = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}


# A statistic, the 95 % interval and the two-sided p of one and the same hypothesis, and how many
# prototypes and texts they rest on. Null where it cannot be computed.
_TESTED = closed(
    {
        "value": MAYBE,
        "low": MAYBE,
        "high": MAYBE,
        "p": MAYBE,
        "prototypes": COUNT,
        "texts": COUNT,
    }
)

# Gate statistics of one prototype over all analysed tokens (spec rows PT-66..69, 71).
_GATE = closed(
    {
        "mean": NUMBER,
        "max": NUMBER,
        # Largest over mean across tokens; null where it is never open. Eq. 3 is across prototypes.
        "peak_over_mean": MAYBE,
        # Mutual information between token and gate in 10 quantile bins, in nats, Miller-Madow; and
        # what it is with the tokens shuffled.
        "mutual_information": MAYBE,
        "mutual_information_by_chance": MAYBE,
        # Share of tokens where this prototype has the largest gate, and where its gate is >= 0.01.
        "top_1": NUMBER,
        "active": NUMBER,
    }
)

_INTERVAL = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}

# What has an interval over texts.
RESAMPLED = (
    "l1_ratio",
    "gini",
    "entropy",
    "top_1",
    "margin",
    "active",
    "usage_gini",
    "max_share",
)

# The same of a layer, over its prototypes.
_LAYER_GATE = closed(
    {
        # Means over tokens of Eq. 3, 4 and 5 (nats); Gini of the prototypes' shares of the writing,
        # which is that of Table 15.
        "l1_ratio": NUMBER,
        "gini": NUMBER,
        "entropy": NUMBER,
        "usage_gini": NUMBER,
        # Means over prototypes.
        "mutual_information": MAYBE,
        "mutual_information_by_chance": MAYBE,
        # Mean over tokens of the largest gate, and of its lead over the second.
        "top_1": NUMBER,
        "margin": NUMBER,
        # Mean number of prototypes with a gate >= 0.01, largest share of the writing, and how many
        # never have a gate >= 0.01.
        "active": NUMBER,
        "max_share": NUMBER,
        "dead": COUNT,
        # Ends of bootstraps over texts, 95 %.
        "intervals": closed(dict.fromkeys(RESAMPLED, _INTERVAL)),
    }
)

# A judge's view of one prototype (PT-61). `null` judges give no label at all.
_LABEL = closed(
    {
        "theme": TEXT,
        "disentanglement": NUMBER,
        "coverage": NUMBER,
        "themes": COUNT,
        "explanation": TEXT,
    }
)

_SHOWN = closed(
    {
        # An index into `texts`.
        "text": COUNT,
        "mean": NUMBER,
        "sum": NUMBER,
        "write": _GATES,
        "read": _GATES,
        "memory": _GATES,
    }
)

_PROTOTYPE = closed(
    {
        "layer": COUNT,
        "prototype": COUNT,
        "decay": NUMBER,
        # In tokens; null where the decay has rounded to 1.
        "half_life": MAYBE,
        "write": _GATE,
        "read": _GATE,
        # 1 - unique / all of the tokens it writes most.
        "repetition": MAYBE,
        # Cross-correlation of read with write at lags -5..5; `lag` is where it peaks, and below 0
        # where reading comes before writing.
        "lag": {"type": ["integer", "null"]},
        "cross_correlation": listed(MAYBE),
        "top_tokens": listed(
            closed({"token": TEXT, "id": COUNT, "mean": NUMBER, "sum": NUMBER, "count": COUNT})
        ),
        "top_texts": listed(_SHOWN),
        "label": or_null(_LABEL),
    }
)

SCHEMA: Mapping[str, Any] = {
    "$schema": DRAFT,
    "title": "Concept report of a Prototype Transformer",
    **closed(
        {
            "schema": {"const": NAME},
            "version": {"const": VERSION},
            "model": closed(
                {
                    "seed": COUNT,
                    "step": COUNT,
                    "layers": COUNT,
                    "prototypes": COUNT,
                    "hidden_size": COUNT,
                    "context": COUNT,
                    "vocab_size": COUNT,
                    "parameters": COUNT,
                    "shared_routing": TRUTH,
                    "corpus": TEXT,
                    # Of the analysed texts themselves.
                    "perplexity": NUMBER,
                }
            ),
            # What was asked for, and how much text there was.
            "settings": closed(
                {
                    "split": TEXT,
                    "texts": COUNT,
                    "length": COUNT,
                    "tokens": COUNT,
                    "top": COUNT,
                    "rank_by": {"enum": ["mean", "sum"]},
                    "judge": TEXT,
                    "resamples": COUNT,
                    "seed": COUNT,
                }
            ),
            "texts": listed(
                closed(
                    {
                        "document": COUNT,
                        "tokens": listed(TEXT),
                        # As many pieces as words; joined by nothing they give the text back.
                        "words": listed(TEXT),
                        # Which word each token is of.
                        "word_of": listed(COUNT),
                        "perplexity": NUMBER,
                    }
                )
            ),
            "layers": listed(closed({"layer": COUNT, "write": _LAYER_GATE, "read": _LAYER_GATE})),
            "prototypes": listed(_PROTOTYPE),
            "half_life_repetition": closed(
                {
                    # Within layers: correlation of the ranks of half-life and repetition; Cohen's d
                    # of the shortest against the longest quarter of half-lives.
                    "spearman": _TESTED,
                    "cohens_d": _TESTED,
                    # Over all prototypes, whatever their layer, as Table 21: depth is part of it.
                    "overall_spearman": MAYBE,
                    "overall_cohens_d": MAYBE,
                    # Mean repetition by quartile of half-life, short first.
                    "quartiles": listed(MAYBE),
                }
            ),
            "lag": closed(
                {
                    "lags": listed({"type": "integer"}),
                    # Mean cross-correlation over prototypes at each lag.
                    "mean": listed(MAYBE),
                    # Mean correlation at lag -1 less that at lag 0; bootstrap over texts.
                    "lead": _TESTED,
                    # The same less its mean over the read gates of the layer's other prototypes;
                    # read gates of a layer change owners.
                    "own_lead": _TESTED,
                    # Share of prototypes whose peak is at lag -1.
                    "peaks_one_before": MAYBE,
                }
            ),
            # The same judge over random texts in place of top texts (PT-64).
            "baseline": {
                "anyOf": [
                    {"type": "null"},
                    listed(closed({"texts": listed(COUNT), "label": or_null(_LABEL)})),
                ]
            },
        }
    ),
}
