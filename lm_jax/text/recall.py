"""Random sequences whose answers are in the sequence: induction, MQAR and a needle.

    induction   a b c d e a b c            each token of a block is followed as in its first copy
    mqar        k v l w . l w . . k        each key is queried once and followed by its value
    needle      . . mark v . . . mark      the token after the mark, which is known beforehand

Induction is after Olsson et al. 2022, multi-query associative recall after Arora et al. 2023
("Zoology: Measuring and Improving Recall in Efficient Language Models"), the needle after the
single-needle tasks of RULER (Hsieh et al. 2024), whose text is here a row of random tokens.

All draw from a `RandomState`, whose stream is frozen by NumPy's NEP 19: equal seeds give equal
sequences in every version.
"""

from typing import Literal, NamedTuple

import numpy as np

from lm_jax.errors import BadInputError, UsageError


class Recall(NamedTuple):
    """A sequence of ids and its answers, in the order of the queries.

    `queries` are the positions from which `targets` are predicted, and `answers` the earlier
    positions that hold them. A target that is not the last is the next token of the sequence.
    """

    tokens: list[int]
    queries: tuple[int, ...]
    targets: tuple[int, ...]
    answers: tuple[int, ...]


def draw(rng: np.random.RandomState, ordinary: np.ndarray, size: int) -> list[int]:
    """Returns `size` distinct ids of `ordinary`; BadInputError where it has fewer."""
    if size > len(ordinary):
        raise BadInputError(
            f"a prompt needs {size} distinct random tokens, the vocabulary has {len(ordinary)} "
            "ordinary ones: shorten the prompt"
        )
    return ordinary[rng.permutation(len(ordinary))[:size]].tolist()


def induction(
    rng: np.random.RandomState,
    ordinary: np.ndarray,
    length: int,
    form: Literal["block", "pair"] = "block",
) -> Recall:
    """`length` tokens that end before the one to predict.

    Args:
      rng: the generator.
      ordinary: the ids to draw from, `[V]`.
      length: number of tokens, at least 3.
      form: "block" repeats the beginning of a block of length // 2 + 1 distinct tokens; "pair" is
        distinct tokens, of which one comes back at the end.

    Raises:
      BadInputError: there are too few ids.
    """
    if form == "block":
        size = length // 2 + 1
        block = draw(rng, ordinary, size)
        again = length - size
        answers = tuple(range(1, again + 1))
        return Recall(
            [*block, *block[:again]],
            tuple(size + i for i in range(again)),
            tuple(block[answer] for answer in answers),
            answers,
        )
    tokens = draw(rng, ordinary, length - 1)
    answer = int(rng.randint(1, length - 1))
    tokens.append(tokens[answer - 1])
    return Recall(tokens, (length - 1,), (tokens[answer],), (answer,))


def least_mqar_length(pairs: int) -> int:
    """The length of a sequence without noise: pairs, then queries, the last without its value."""
    return 4 * pairs - 1


def mqar(rng: np.random.RandomState, ordinary: np.ndarray, length: int, pairs: int) -> Recall:
    """Key-value pairs, then every key in random order with its value, and noise in between.

    Keys, values and noise are different tokens; the sequence ends with the last key.

    Args:
      rng: the generator.
      ordinary: the ids to draw from, `[V]`.
      length: number of tokens.
      pairs: number of pairs, at least 1.

    Raises:
      UsageError: the length is too short for the pairs.
      BadInputError: there are too few ids.
    """
    noise = length - least_mqar_length(pairs)
    if noise < 0:
        raise UsageError(
            f"length={length} is too short for pairs={pairs}: raise it to {length - noise} or more"
        )
    # One more than the pairs need, so that there is noise to draw.
    drawn = draw(rng, ordinary, 2 * pairs + bool(noise))
    keys, values = drawn[:pairs], drawn[pairs : 2 * pairs]
    others = np.setdiff1d(ordinary, drawn[: 2 * pairs])
    tokens = []
    for key, value in zip(keys, values, strict=True):
        tokens += [key, value]
    # Slots hold a noise token or a query with its answer; the last query comes after all of them.
    slots = pairs - 1 + noise
    query_slots = set(rng.permutation(slots)[: pairs - 1].tolist())
    order = rng.permutation(pairs).tolist()
    queries = []
    for slot in range(slots):
        if slot in query_slots:
            pair = order[len(queries)]
            queries.append(len(tokens))
            tokens += [keys[pair], values[pair]]
        else:
            tokens.append(int(others[rng.randint(len(others))]))
    queries.append(len(tokens))
    tokens.append(keys[order[-1]])
    return Recall(
        tokens,
        tuple(queries),
        tuple(values[pair] for pair in order),
        tuple(2 * pair + 1 for pair in order),
    )


def needle(rng: np.random.RandomState, ordinary: np.ndarray, length: int) -> Recall:
    """Noise in which the mark stands once, before a value, and again at the end.

    The mark is the first of `ordinary` in every sequence, so that what is to be kept is known when
    it is read. The value is drawn from all others, and noise is neither.

    Args:
      rng: the generator.
      ordinary: the ids to draw from, `[V]`.
      length: number of tokens, at least 3.

    Raises:
      BadInputError: there are fewer than three ids.
    """
    if len(ordinary) < 3:
        raise BadInputError(f"a needle needs 3 tokens, the vocabulary has {len(ordinary)}")
    mark, value = int(ordinary[0]), int(ordinary[rng.randint(1, len(ordinary))])
    others = ordinary[(ordinary != mark) & (ordinary != value)]
    tokens = others[rng.randint(len(others), size=length)].tolist()
    answer = int(rng.randint(1, length - 1))
    tokens[answer - 1], tokens[answer], tokens[-1] = mark, value, mark
    return Recall(tokens, (length - 1,), (value,), (answer,))
