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

from protot_jax.json_schema import COUNT, DRAFT, MAYBE, NUMBER, TEXT, TRUTH, closed, listed, or_null

VERSION = 1
NAME = "protot_jax.concepts"

_GATES = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}


# A statistic with what it rests on; `p` is two-sided, `low` and `high` bound 95 %.
_TESTED = {"value": MAYBE, "p": MAYBE, "low": MAYBE, "high": MAYBE, "n": COUNT}

# Gate statistics of one prototype over all analysed tokens (spec rows PT-66..69, 71).
_GATE = closed(
    {
        "mean": NUMBER,
        "max": NUMBER,
        # Largest over mean; null where it is never open.
        "l1_ratio": MAYBE,
        # Mutual information between token and gate in 10 quantile bins, in nats, Miller-Madow.
        "mutual_information": MAYBE,
        # Share of tokens where this prototype has the largest gate, and where its gate is >= 0.01.
        "top_1": NUMBER,
        "active": NUMBER,
    }
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
        # Mean over prototypes, and with tokens shuffled: what a small sample gives by chance.
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
                    "permutations": COUNT,
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
                    # Spearman's correlation; mean repetition by quartile of half-life, short first;
                    # Cohen's d of the first against the last quartile.
                    "spearman": closed(_TESTED),
                    "quartiles": listed(MAYBE),
                    "cohens_d": closed(_TESTED),
                }
            ),
            "lag": closed(
                {
                    "lags": listed({"type": "integer"}),
                    # Mean cross-correlation over prototypes at each lag.
                    "mean": listed(MAYBE),
                    # Mean correlation at lag -1 less that at lag 0, and a test in which the read
                    # gates of a layer change owners.
                    "lead": closed(_TESTED),
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
