"""What an intervention leaves: `intervention.json` as JSON Schema, the columns of the parquet file.

The page `intervention.html` shows the first file and holds nothing else. Version 1: a reader
refuses another one; a field that is added keeps the version, a change of meaning raises it.

A change is relative and in percent, 100 (p' / p - 1) for a probability and likewise for a
perplexity. An interval is of 95 %.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

VERSION = 1
NAME = "protot_jax.intervene"

_NUMBER = {"type": "number"}
_MAYBE = {"type": ["number", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_TRUTH = {"type": "boolean"}


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


def _or_null(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [dict(item), {"type": "null"}]}


# Null ends where one value, or none, has no interval.
_INTERVAL = _closed({"mean": _MAYBE, "low": _MAYBE, "high": _MAYBE, "n": _COUNT})
_PLACE = {"layer": _COUNT, "prototype": _COUNT}

_CONTROL = _closed(
    {
        # The chosen prototype's effect, over `settings.control_draws` draws as that of the others.
        "chosen": _NUMBER,
        # Of the chosen one among the others, ties counted half: 0 is the greatest drop of all.
        "percentile": {"type": "number", "minimum": 0, "maximum": 100},
        # Share of prototypes whose drop is as great, the chosen one counted in.
        "p_drop": _NUMBER,
        # How many others; their mean effect, and what 2.5 % and 97.5 % of them do not exceed.
        "n": _COUNT,
        "mean": _NUMBER,
        "low": _NUMBER,
        "high": _NUMBER,
        # By layer and prototype, the chosen one among them.
        "effects": _list(_list(_NUMBER)),
        # The others of greatest drop.
        "strongest": _list(_closed({**_PLACE, "effect": _NUMBER})),
    }
)

_MODE = _closed(
    {
        "mode": {"enum": ["reinitialise", "mask_write", "mask_read", "zero_write", "zero_read"]},
        # Mean change over kept sentences, each the mean of its draws; Student's interval over them.
        "effect": _INTERVAL,
        # By sentence, in the order of `sentences`; Student's interval over draws.
        "sentences": _list(_INTERVAL),
        # Change of the perplexity of the sentences themselves, over kept ones.
        "sentence_perplexity": _INTERVAL,
        # Change of the perplexity of validation text; bootstrap over its n rows.
        "text_perplexity": _or_null(_INTERVAL),
        # Null without kept sentences or without other prototypes.
        "control": _or_null(_CONTROL),
    }
)

_SENTENCE = _closed(
    {
        "concept": _TEXT,
        "target": _TEXT,
        "text": _TEXT,
        "where": _TEXT,
        # How often the sentence has the target before that.
        "earlier": _COUNT,
        # Tokens whose probability it is.
        "target_tokens": _COUNT,
        "baseline": {"type": "number", "minimum": 0, "maximum": 1},
        "perplexity": _NUMBER,
        # Whether the baseline is at least `settings.least_probability`.
        "kept": _TRUTH,
    }
)

# How the prototype of the first model was found again in this one; null for the first.
_MATCH = _or_null(
    _closed(
        {
            **_PLACE,
            "similarity": _NUMBER,
            "best": _NUMBER,
            "median": _NUMBER,
            "null_mean": _NUMBER,
            "null_95": _NUMBER,
            "p_value": _NUMBER,
            "tokens": _COUNT,
        }
    )
)

_SEED = _closed(
    {
        "run": _TEXT,
        "seed": _COUNT,
        "step": _COUNT,
        **_PLACE,
        "match": _MATCH,
        # Where this prototype stands among all by the words, from 1 on, and the first of them.
        "place": {"type": ["integer", "null"]},
        "ranking": _list(
            _closed({**_PLACE, "score": _NUMBER, "on_words": _NUMBER, "elsewhere": _NUMBER})
        ),
        "sentences": _list(_SENTENCE),
        "kept": _COUNT,
        "excluded": _COUNT,
        "text": _or_null(_closed({"perplexity": _NUMBER, "tokens": _COUNT})),
        "modes": _list(_MODE),
    }
)

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Intervention on one prototype of a Prototype Transformer",
    **_closed(
        {
            "schema": {"const": NAME},
            "version": {"const": VERSION},
            "model": _closed(
                {
                    "corpus": _TEXT,
                    "layers": _COUNT,
                    "prototypes": _COUNT,
                    "hidden_size": _COUNT,
                    "vocab_size": _COUNT,
                    "shared_routing": _TRUTH,
                }
            ),
            "settings": _closed(
                {
                    # Null where the sentences are not those of one concept.
                    "concept": {"type": ["string", "null"]},
                    "words": _list(_TEXT),
                    # How often each word occurs in the validation text that was read.
                    "occurrences": {"type": "object", "additionalProperties": _COUNT},
                    # Whether the prototype was found by the words, and not given.
                    "found": _TRUTH,
                    "shipped_sentences": _TRUTH,
                    "all_subtokens": _TRUTH,
                    "least_probability": _NUMBER,
                    "draws": _COUNT,
                    "control_draws": _COUNT,
                    "reinit_seed": _COUNT,
                    "gate_tokens": _COUNT,
                }
            ),
            # The model that was named first, then other seeds and runs.
            "seeds": _list(_SEED),
            # Sentences that hold no target, or one that is not in the vocabulary.
            "skipped": _list(_closed({"where": _TEXT, "target": _TEXT, "reason": _TEXT})),
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
