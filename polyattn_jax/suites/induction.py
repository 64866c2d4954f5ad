"""Induction prompts: a sequence that occurred before must be continued when it recurs.

After Olsson et al. 2022 (repeated random tokens) as used in "When Does Polynomial Attention
Concentrate?", section 5.1 and Appendix B: random tokens of the vocabulary, lengths 256 to 4096,
200 prompts, seed 0. The paper does not say how the tokens repeat, so there are two forms:

  * "block": a random block of distinct tokens, then its beginning again, cut where the length is
    reached: `a b c d e a b c` -> `d`. The block is just over half of the prompt.
  * "pair": distinct random tokens, of which one comes back at the end: `a b c d e f b` -> `c`. A
    single pair among noise, as hard as the paper's low softmax baselines suggest.

Distinct tokens make the answer unambiguous: the query occurs once before, the answer once.
"""

from typing import Literal

from lm_jax.errors import UsageError
from lm_jax.text import recall
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite, Vocabulary


def induction(
    *,
    vocabulary: Vocabulary,
    length: int,
    n: int = 200,
    seed: int = 0,
    common: int | None = None,
    form: Literal["block", "pair"] = "block",
    max_length: int | None = None,
) -> Suite:
    """Returns `n` prompts of exactly `length` tokens that end right before the token to predict.

    Args:
      vocabulary: a tokenizer, whose special tokens are left out of the draw and whose start token
        is put first if its default does so; or a plain vocabulary size.
      length: total tokens of a prompt, start token included.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      common: the number of lowest ordinary ids to draw from; None for all, see `ordinary_tokens`.
      form: "block" or "pair", see the module.
      max_length: the model's context, checked by the audit.

    Raises:
      UsageError: for an unknown form, or a length that leaves fewer than three random tokens.
      BadInputError: for n < 1, a prompt that is too long, or a vocabulary with too few tokens.
    """
    if form not in ("block", "pair"):
        raise UsageError(f"form={form!r} is unknown: choose 'block' or 'pair'")
    start = prompts_lib.start_tokens(vocabulary)
    body = length - len(start)
    if body < 3:
        raise UsageError(f"length={length} leaves {body} random tokens of at least 3: raise it")
    ordinary = prompts_lib.ordinary_tokens(vocabulary, common)
    prompts = []
    for index in range(n):
        made = recall.induction(prompts_lib.rng(seed, index), ordinary, body, form)
        prompts.append(
            Prompt(
                id=f"induction-{index:04d}",
                tokens=(*start, *made.tokens),
                target=made.targets[-1],
                answer_position=len(start) + made.answers[-1],
            )
        )
    return prompts_lib.make_suite(
        "induction",
        prompts,
        vocabulary=vocabulary,
        plant="pair",
        max_length=max_length,
        facts={"seed": seed, "length": length, "form": form, **prompts_lib.draw_facts(ordinary)},
    )


def repeated_tokens(
    *,
    vocabulary: Vocabulary,
    half: int = 100,
    n: int = 10,
    seed: int = 0,
    common: int | None = 15_000,
    max_length: int | None = None,
) -> Suite:
    """Returns prompts of `half` distinct random tokens written twice, to measure induction by loss.

    The scored queries predict all tokens of a copy but its first, which no token of the copy
    precedes: `half - 1` queries in the first copy, as many in the second, in the same order.
    `copies` says which are which. In a model that does induction the loss falls from copy to copy.

    Args:
      vocabulary: the argument of `induction`.
      half: tokens of one copy, at least 2.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      common: the argument of `induction`. A small model hardly knows its rarest tokens, which hides
        its induction: SmolLM2-135M goes from 12.8 to 1.7 nats on the lowest 15,000 ids, from 13.9
        to about 3 on all.
      max_length: the model's context, checked by the audit.

    Raises:
      UsageError: for half < 2.
      BadInputError: as in `induction`.
    """
    if half < 2:
        raise UsageError(f"half={half} has nothing to predict: give at least 2")
    start = prompts_lib.start_tokens(vocabulary)
    ordinary = prompts_lib.ordinary_tokens(vocabulary, common)
    offset = len(start)
    first = range(offset, offset + half - 1)
    queries = (*first, *(query + half for query in first))
    prompts = []
    for index in range(n):
        block = recall.draw(prompts_lib.rng(seed, index), ordinary, half)
        prompts.append(
            Prompt(
                id=f"repeated-{index:04d}",
                tokens=(*start, *block, *block),
                target=(*block[1:], *block[1:]),
                answer_position=(*(-1 for _ in first), *(query + 1 for query in first)),
                query_positions=queries,
            )
        )
    return prompts_lib.make_suite(
        "repeated_tokens",
        prompts,
        vocabulary=vocabulary,
        plant="pair",
        max_length=max_length,
        facts={"seed": seed, "half": half, **prompts_lib.draw_facts(ordinary)},
    )


def copies(prompt: Prompt) -> tuple[slice, slice]:
    """Returns the slices of `query_positions` and `target` in the first and second copy."""
    queries = len(prompt.query_positions)
    return slice(0, queries // 2), slice(queries // 2, queries)
