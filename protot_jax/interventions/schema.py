"""What an intervention leaves: its JSON files as JSON Schema, the columns of the parquet file.

The page `intervention.html` shows `intervention.json` and holds nothing else, and so does
`comparison.html` of `comparison.json`, which several concepts at once leave. Version 2: a reader
refuses another one; a field that is added keeps the version, a change of meaning raises it.

A change is relative and in percent, 100 (p' / p - 1) for a probability and likewise for a
perplexity. An interval is of 95 %.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from protot_jax.json_schema import COUNT, DRAFT, MAYBE, NUMBER, TEXT, TRUTH, closed, listed, or_null

VERSION = 2
NAME = "protot_jax.interventions"
COMPARISON_NAME = "protot_jax.interventions.comparison"


# Null ends where one value, or none, has no interval.
_INTERVAL = closed({"mean": MAYBE, "low": MAYBE, "high": MAYBE, "n": COUNT})
# Over `sentences` sentences of `n` different texts, which are the independent units.
EFFECT = closed({"mean": MAYBE, "low": MAYBE, "high": MAYBE, "n": COUNT, "sentences": COUNT})
_PLACE = {"layer": COUNT, "prototype": COUNT}

_CONTROL = closed(
    {
        # The chosen prototype's effect, over `settings.control_draws` draws as that of the others.
        "chosen": NUMBER,
        # Of the chosen one among the others, ties counted half: 0 is the greatest drop of all.
        "percentile": {"type": "number", "minimum": 0, "maximum": 100},
        # How many of the others have as low an effect or a lower; and, two-sided, twice the share
        # of prototypes, the chosen one counted in, that lie as far out on its side.
        "as_low": COUNT,
        "p": {"type": "number", "minimum": 0, "maximum": 1},
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
        # Mean change over kept sentences, each the mean of its draws; Student's interval over their
        # texts.
        "effect": EFFECT,
        # By sentence, in the order of `sentences`; Student's interval over draws.
        "sentences": listed(_INTERVAL),
        # Change of the perplexity of the sentences themselves, over kept ones.
        "sentence_perplexity": EFFECT,
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

# How the prototype of the first model was found again in this one (`matching.Match`); null for the
# first.
_MATCH = or_null(
    closed(
        {
            **_PLACE,
            "similarity": NUMBER,
            "best": NUMBER,
            "median": NUMBER,
            "null_median": NUMBER,
            "null_95": NUMBER,
            "percentile": {"type": "number", "minimum": 0, "maximum": 100},
            "p_value": NUMBER,
            "others": COUNT,
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
        # Whether `zero_write` has an interval without 0 and a p of at most 0.05; null where there
        # is no interval or no other prototype.
        "specific": {"type": ["boolean", "null"]},
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
                    # The concepts that were tested with it, itself among them; none for one alone.
                    "together": listed(TEXT),
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

COMPARISON: Mapping[str, Any] = {
    "$schema": DRAFT,
    "title": "Interventions for several concepts",
    **closed(
        {
            "schema": {"const": COMPARISON_NAME},
            "version": {"const": VERSION},
            "concepts": listed(
                closed(
                    {
                        "concept": TEXT,
                        **_PLACE,
                        # Of `zero_write`, its p among controls, and the least p that a prototype of
                        # so many can have; null without a test.
                        "effect": EFFECT,
                        "p": MAYBE,
                        "least_p": MAYBE,
                        # Corrected for all concepts, and the verdict by it.
                        "p_holm": MAYBE,
                        "specific": {"type": ["boolean", "null"]},
                    }
                )
            ),
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
