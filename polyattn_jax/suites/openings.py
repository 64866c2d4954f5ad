"""Openings of literature after random tokens: does a model still continue what it has memorised?

After the "copying" suite of "When Does Polynomial Attention Concentrate?", Appendix B: 200 openings
of well-known novels, padded with random tokens to a target length. The paper does not list them and
says that models know them by heart, so this measures memory, not retrieval. Ours are the 54 of
`polyattn_jax/data/openings.txt`, all in the public domain in the US. Each is in one prompt at most:
two prompts of one opening would not be independent, as intervals take prompts to be.

1. Prompt i has opening i. It is cut before one of the words of its second half, where the tokens
   before the cut do not depend on what follows; the target is the first token of that word.
2. Random ordinary tokens before it fill the prompt to its length.
"""

import hashlib
import importlib.resources

import numpy as np

from lm_jax.errors import BadInputError, CorruptError, UsageError
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer

COUNT = 54
OPENINGS_SHA256 = "40c9e33b76e0186e7be32203ed2582d8503083d6aa99c60a16648ba3253620aa"


def openings() -> dict[str, str]:
    """The shipped openings by title, author and year.

    Raises:
      CorruptError: if the file is not the one that was shipped.
    """
    file = importlib.resources.files("polyattn_jax") / "data" / "openings.txt"
    raw = file.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != OPENINGS_SHA256:
        raise CorruptError(
            f"polyattn_jax/data/openings.txt: sha256 {digest[:12]} is not the shipped "
            f"{OPENINGS_SHA256[:12]}; reinstall the package"
        )
    return dict(line.split("\t", 1) for line in raw.decode("utf-8").splitlines())


def copying(
    tokenizer: Tokenizer,
    *,
    length: int,
    n: int = COUNT,
    seed: int = 0,
    common: int | None = None,
    max_length: int | None = None,
) -> Suite:
    """Returns `n` prompts of exactly `length` tokens; `meta` holds work, text and answer.

    Args:
      tokenizer: the model's own.
      length: total tokens of a prompt, start token included.
      n: number of prompts, `COUNT` at most.
      seed: random seed in [0, 2**32).
      common: the number of lowest ordinary ids from which the padding is drawn; None for all.
      max_length: the model's context, checked by the audit.

    Raises:
      UsageError: for more prompts than openings, or a length that an opening does not fit.
      BadInputError: for an opening that the tokenizer cannot cut, and as `make_suite`.
    """
    start = prompts_lib.start_tokens(tokenizer)
    ordinary = prompts_lib.ordinary_tokens(tokenizer, common)
    works = list(openings().items())
    if n > len(works):
        raise UsageError(
            f"n={n}, but there are {len(works)} openings, and two prompts of one are not "
            f"independent: give {len(works)} or fewer"
        )
    prompts = []
    for index, (work, text) in enumerate(works[:n]):
        rng = prompts_lib.rng(seed, index)
        kept, ids, target = _cut(tokenizer, work, text, rng)
        pad = length - len(start) - len(ids)
        if pad < 0:
            raise UsageError(
                f"length={length} is too short for the opening of {work}: give "
                f"{len(start) + len(ids)} or more"
            )
        noise = ordinary[rng.randint(len(ordinary), size=pad)].tolist()
        prompts.append(
            Prompt(
                id=f"copying-{index:04d}",
                tokens=(*start, *noise, *ids),
                target=target,
                answer_position=None,
                meta={"work": work, "text": kept, "padding": pad},
            )
        )
    return prompts_lib.make_suite(
        "copying",
        prompts,
        vocabulary=tokenizer,
        plant="none",
        max_length=max_length,
        facts={
            "seed": seed,
            "length": length,
            "openings": len(works),
            "openings_sha256": prompts_lib.sha256_lines([text for _, text in works]),
            **prompts_lib.draw_facts(ordinary),
        },
    )


def _cut(
    tokenizer: Tokenizer, work: str, text: str, rng: np.random.RandomState
) -> tuple[str, list[int], int]:
    """The text before a word of the second half, its tokens, and the next token."""
    whole = prompts_lib.encode(tokenizer, text, start=False)
    spaces = [i for i, character in enumerate(text) if character == " "]
    late = [i for i in spaces if i >= len(text) // 2]
    for place in rng.permutation(len(late)):
        kept = text[: late[place]]
        ids = prompts_lib.encode(tokenizer, kept, start=False)
        if ids and whole[: len(ids)] == ids and len(whole) > len(ids):
            return kept, ids, whole[len(ids)]
    raise BadInputError(
        f"the tokenizer joins all words of the opening of {work}: leave the suite copying out"
    )
