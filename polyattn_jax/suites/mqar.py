"""Multi-query associative recall: key-value pairs occur once, then the keys are queried.

After Arora et al. 2023 ("Zoology: Measuring and Improving Recall in Efficient Language Models"),
the MQAR suite of "When Does Polynomial Attention Concentrate?", section 5.1. One prompt is

    [start] k1 v1 k2 v2 ... kP vP   noise ... k5 v5 noise ... k2 v2 noise ... k7

1. P key-value pairs of distinct random tokens, keys and values apart;
2. then every key again in random order, each followed by its value, with noise tokens between them
   at uniformly random places; noise is neither key nor value;
3. the prompt ends with the last key; its value is the target.

The paper gives neither P nor the vocabulary. Ours are 8 pairs and all ordinary tokens, and one
query is read per prompt, as the paper's row counts (layers x heads x 200) imply; `read="all"` reads
every query. Arora et al. draw the gaps between queries from a power law instead.
"""

from typing import Literal

import numpy as np

from lm_jax.errors import UsageError
from lm_jax.text import recall
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite, Vocabulary


def mqar(
    *,
    vocabulary: Vocabulary,
    length: int,
    pairs: int = 8,
    n: int = 200,
    seed: int = 0,
    common: int | None = None,
    read: Literal["last", "all"] = "last",
    max_length: int | None = None,
) -> Suite:
    """Returns `n` recall prompts of exactly `length` tokens.

    Args:
      vocabulary: a tokenizer, whose special tokens are left out of the draw and whose start token
        is put first if its default does so; or a plain vocabulary size.
      length: total tokens of a prompt, start token included.
      pairs: number of key-value pairs, each queried once.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      common: the number of lowest ordinary ids to draw from; None for all, see `ordinary_tokens`.
      read: "last" scores the last query; "all" scores every query, with targets in order.
      max_length: the model's context, checked by the audit.

    Raises:
      UsageError: for pairs < 1, an unknown `read`, or a length too short for the pairs and queries.
      BadInputError: for n < 1, a prompt that is too long, or a vocabulary with too few tokens.
    """
    if read not in ("last", "all"):
        raise UsageError(f"read={read!r} is unknown: choose 'last' or 'all'")
    if pairs < 1:
        raise UsageError(f"pairs={pairs} leaves nothing to recall: give at least 1")
    start = prompts_lib.start_tokens(vocabulary)
    least = len(start) + recall.least_mqar_length(pairs)
    if length < least:
        raise UsageError(
            f"length={length} is too short for pairs={pairs}: raise it to {least} or more"
        )
    ordinary = prompts_lib.ordinary_tokens(vocabulary, common)
    prompts = [
        _prompt(index, prompts_lib.rng(seed, index), ordinary, start, length, pairs, read)
        for index in range(n)
    ]
    return prompts_lib.make_suite(
        "mqar",
        prompts,
        vocabulary=vocabulary,
        plant="pair",
        max_length=max_length,
        facts={
            "seed": seed,
            "length": length,
            "pairs": pairs,
            "read": read,
            **prompts_lib.draw_facts(ordinary),
        },
    )


def _prompt(
    index: int,
    rng: np.random.RandomState,
    ordinary: np.ndarray,
    start: tuple[int, ...],
    length: int,
    pairs: int,
    read: str,
) -> Prompt:
    made = recall.mqar(rng, ordinary, length - len(start), pairs)
    queries, answers = (
        tuple(len(start) + at for at in positions) for positions in (made.queries, made.answers)
    )
    last = read == "last"
    return Prompt(
        id=f"mqar-{index:04d}",
        tokens=(*start, *made.tokens),
        target=made.targets[-1] if last else made.targets,
        answer_position=answers[-1] if last else answers,
        query_positions=queries[-1:] if last else queries,
    )
