"""What an intervention leaves: `intervention.json` as JSON Schema, the columns of the parquet file.

The page `intervention.html` shows the first file and holds nothing else. Version 1: a reader
refuses another one; a field that is added keeps the version, a change of meaning raises it.

A change is relative and in percent, 100 (p' / p - 1) for a probability and likewise for a
perplexity. An interval is of 95 %.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from protot_jax.json_schema import COUNT, DRAFT, MAYBE, NUMBER, TEXT, TRUTH, closed, listed, or_null

VERSION = 1
NAME = "protot_jax.intervene"


# Null ends where one value, or none, has no interval.
_INTERVAL = closed({"mean": MAYBE, "low": MAYBE, "high": MAYBE, "n": COUNT})
_PLACE = {"layer": COUNT, "prototype": COUNT}

_CONTROL = closed(
    {
        # The chosen prototype's effect, over `settings.control_draws` draws as that of the others.
        "chosen": NUMBER,
        # Of the chosen one among the others, ties counted half: 0 is the greatest drop of all.
        "percentile": {"type": "number", "minimum": 0, "maximum": 100},
        # Share of prototypes whose drop is as great, the chosen one counted in.
        "p_drop": NUMBER,
        # How many others; their mean effect, and what 2.5 % and 97.5 % of them do not exceed.
        "n": COUNT,
        "mean": NUMBER,
        "low": NUMBER,
        "high": NUMBER,
        # By layer and prototype, the chosen one among them.
        "effects": listed(listed(NUMBER)),
        # The others of greatest drop.
        "strongest": listed(closed({**_PLACE, "effect": NUMBER})),
    }
)

_MODE = closed(
    {
        "mode": {"enum": ["reinitialise", "mask_write", "mask_read", "zero_write", "zero_read"]},
        # Mean change over kept sentences, each the mean of its draws; Student's interval over them.
        "effect": _INTERVAL,
        # By sentence, in the order of `sentences`; Student's interval over draws.
        "sentences": listed(_INTERVAL),
        # Change of the perplexity of the sentences themselves, over kept ones.
        "sentence_perplexity": _INTERVAL,
        # Change of the perplexity of validation text; bootstrap over its n rows.
        "text_perplexity": or_null(_INTERVAL),
        # Null without kept sentences or without other prototypes.
        "control": or_null(_CONTROL),
    }
)

_SENTENCE = closed(
    {
        "concept": TEXT,
        "target": TEXT,
        "text": TEXT,
        "where": TEXT,
        # How often the sentence has the target before that.
        "earlier": COUNT,
        # Tokens whose probability it is.
        "target_tokens": COUNT,
        "baseline": {"type": "number", "minimum": 0, "maximum": 1},
        "perplexity": NUMBER,
        # Whether the baseline is at least `settings.least_probability`.
        "kept": TRUTH,
    }
)

# How the prototype of the first model was found again in this one; null for the first.
_MATCH = or_null(
    closed(
        {
            **_PLACE,
            "similarity": NUMBER,
            "best": NUMBER,
            "median": NUMBER,
            "null_mean": NUMBER,
            "null_95": NUMBER,
            "p_value": NUMBER,
            "tokens": COUNT,
        }
    )
)

_SEED = closed(
    {
        "run": TEXT,
        "seed": COUNT,
        "step": COUNT,
        **_PLACE,
        "match": _MATCH,
        # Where this prototype stands among all by the words, from 1 on, and the first of them.
        "place": {"type": ["integer", "null"]},
        "ranking": listed(
            closed({**_PLACE, "score": NUMBER, "on_words": NUMBER, "elsewhere": NUMBER})
        ),
        "sentences": listed(_SENTENCE),
        "kept": COUNT,
        "excluded": COUNT,
        "text": or_null(closed({"perplexity": NUMBER, "tokens": COUNT})),
        "modes": listed(_MODE),
    }
)

SCHEMA: Mapping[str, Any] = {
    "$schema": DRAFT,
    "title": "Intervention on one prototype of a Prototype Transformer",
    **closed(
        {
            "schema": {"const": NAME},
            "version": {"const": VERSION},
            "model": closed(
                {
                    "corpus": TEXT,
                    "layers": COUNT,
                    "prototypes": COUNT,
                    "hidden_size": COUNT,
                    "vocab_size": COUNT,
                    "shared_routing": TRUTH,
                }
            ),
            "settings": closed(
                {
                    # Null where the sentences are not those of one concept.
                    "concept": {"type": ["string", "null"]},
                    "words": listed(TEXT),
                    # How often each word occurs in the validation text that was read.
                    "occurrences": {"type": "object", "additionalProperties": COUNT},
                    # Whether the prototype was found by the words, and not given.
                    "found": TRUTH,
                    "shipped_sentences": TRUTH,
                    "all_subtokens": TRUTH,
                    "least_probability": NUMBER,
                    "draws": COUNT,
                    "control_draws": COUNT,
                    "reinit_seed": COUNT,
                    "gate_tokens": COUNT,
                }
            ),
            # The model that was named first, then other seeds and runs.
            "seeds": listed(_SEED),
            # Sentences that hold no target, or one that is not in the vocabulary.
            "skipped": listed(closed({"where": TEXT, "target": TEXT, "reason": TEXT})),
        }
    ),
}

ROWS = pa.schema(
    [
        # Name of the run's folder, and the seed that was trained.
        ("run", pa.string()),
        ("seed", pa.int64()),
        ("concept", pa.string()),
        ("target", pa.string()),
        # Index into the seed's `sentences`.
        ("sentence", pa.int32()),
        ("layer", pa.int16()),
        ("prototype", pa.int16()),
        # Whether it is the prototype in question, and not a control.
        ("chosen", pa.bool_()),
        ("mode", pa.string()),
        # -1 where nothing is drawn.
        ("draw", pa.int32()),
        # Whether the baseline is high enough to count.
        ("kept", pa.bool_()),
        ("baseline", pa.float64()),
        ("probability", pa.float64()),
        # In percent, and so is the last.
        ("change", pa.float64()),
        ("perplexity", pa.float64()),
        ("perplexity_change", pa.float64()),
    ]
)
