"""What the verdicts of a pairwise judge say: of the players, and of the judge itself.

Scores are of the left player of a pair: 1 if it won, 0.5 for a tie, 0 if it lost, NaN without a
verdict. They are stored as [Q, C, 2]: prompt, pair of players, and order, the left player shown
first and then second.

1. Two rules make wins of them: "each" counts every verdict (the Prototype Transformer paper), and
   "agreed" a win only where both orders agree, else a tie (MT-Bench, Zheng et al., 2023).
2. `consistency` is how far the verdict depends on the order: flips, agreement beyond chance.
3. `Control` compares a judge with one that reads nothing, on pairs of which the better is known:
   the real continuation of a prompt against one that `controls` makes worse. A judge that does not
   beat chance on each kind rates nothing.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np

from lm_jax.evaluate import ratings
from lm_jax.evaluate.pairwise import Shown, Verdict
from lm_jax.run.results import Count
from lm_jax.statistics import Interval, wilson

Rule = Literal["each", "agreed"]
_SCORE: dict[Verdict | None, float] = {"A": 1.0, "Tie": 0.5, "B": 0.0, None: math.nan}
# The kinds that a judge has to see through before its ratings are printed. A language model finds
# text that repeats itself likely, so that its perplexity prefers loops.
DECISIVE = ("shuffled", "other", "looped")
CONTROLS = (*DECISIVE, "itself")
_LOOP = 4


def score(verdicts: Sequence[Verdict | None]) -> list[float]:
    """Scores of the left player from the verdicts in both orders."""
    first, second = (_SCORE[verdict] for verdict in verdicts)
    return [first, 1 - second]


def wins(score_QC2: np.ndarray, pairs: Sequence[tuple[int, int]], players: int, rule: Rule):
    """Wins [Q, P, P] on each prompt, with ties counted half."""
    if rule == "agreed":
        same_QC = score_QC2[..., 0] == score_QC2[..., 1]
        both_QC = ~np.isnan(score_QC2).any(-1)
        agreed_QC = np.where(same_QC, score_QC2[..., 0], 0.5)
        score_QC2 = np.where(both_QC, agreed_QC, np.nan)[..., None]
    left_C, right_C = np.asarray(pairs).T
    result_QPP = np.zeros((len(score_QC2), players, players))
    result_QPP[:, left_C, right_C] = np.nansum(score_QC2, -1)
    result_QPP[:, right_C, left_C] = np.nansum(1 - score_QC2, -1)
    return result_QPP


class Games(NamedTuple):
    """Every verdict as a game, in order of prompts: players, scores and lengths, all [G]."""

    first: np.ndarray
    second: np.ndarray
    score: np.ndarray
    length_G2: np.ndarray


def games(score_QC2: np.ndarray, pairs: Sequence[tuple[int, int]], length_QP: np.ndarray) -> Games:
    """The games that have a verdict; lengths are of the players' texts."""
    prompt_G, pair_G, order_G = np.nonzero(~np.isnan(score_QC2))
    first_G, second_G = np.asarray(pairs)[pair_G].T
    lengths = np.stack([length_QP[prompt_G, first_G], length_QP[prompt_G, second_G]], 1)
    return Games(first_G, second_G, score_QC2[prompt_G, pair_G, order_G], lengths)


@dataclasses.dataclass(frozen=True)
class Consistency:
    """How the verdicts of a judge depend on the order and on lengths.

    Attributes:
      pairs: pairs of texts with a verdict in both orders.
      missing: verdicts that are missing, of two a pair.
      flips: share of pairs whose two verdicts differ; null without any, like the others.
      ties: share of verdicts that are ties.
      first: share of the other verdicts that name the continuation shown first.
      longer: share of the other verdicts that name the longer continuation, in words.
      kappa: Cohen's, of the two orders; null also where all verdicts are the same.
    """

    pairs: Count
    missing: Count
    flips: Interval | None
    ties: Interval | None
    first: Interval | None
    longer: Interval | None
    kappa: float | None


def consistency(
    score_QC2: np.ndarray, pairs: Sequence[tuple[int, int]], length_QP: np.ndarray
) -> Consistency:
    """The consistency of scores; intervals are Wilson's over verdicts or pairs."""
    both = score_QC2[~np.isnan(score_QC2).any(-1)]
    every = score_QC2[~np.isnan(score_QC2)]
    order = np.broadcast_to(np.arange(2), score_QC2.shape)[~np.isnan(score_QC2)]
    played = games(score_QC2, pairs, length_QP)
    decided = every != 0.5
    unequal = decided & (played.length_G2[:, 0] != played.length_G2[:, 1])
    longer = (played.length_G2[:, 0] > played.length_G2[:, 1]) == (played.score == 1)
    kappa = ratings.cohens_kappa(both[:, 0].tolist(), both[:, 1].tolist()) if len(both) else None
    return Consistency(
        pairs=len(both),
        missing=int(np.isnan(score_QC2).sum()),
        flips=_share(both[:, 0] != both[:, 1]),
        ties=_share(~decided),
        # The left player is shown first in order 0, so that it wins where the first is named.
        first=_share(((every == 1) == (order == 0))[decided]),
        longer=_share(longer[unequal]),
        kappa=None if kappa is None or math.isnan(kappa) else kappa,
    )


@dataclasses.dataclass(frozen=True)
class Control:
    """The verdicts on real continuations against worse ones of one kind.

    Attributes:
      kind: what the worse one is (`controls`); "itself" is the same text twice.
      better: prompts on which the real one scores above one half over both orders.
      worse: those on which it scores below; on the others the two orders cancel.
      n: prompts with both verdicts.
      share: better among better and worse, with Wilson's interval; null without any.
      passed: whether that interval is above one half, where a judge that reads nothing is; of
        "itself", whether it holds one half or there is none.
    """

    kind: Literal["shuffled", "other", "looped", "itself"]
    better: Count
    worse: Count
    n: Count
    share: Interval | None
    passed: bool


def control(kind: str, score_Q2: np.ndarray) -> Control:
    """The control of one kind from the scores of the real continuations."""
    mean = score_Q2[~np.isnan(score_Q2).any(-1)].mean(-1)
    better, worse = int((mean > 0.5).sum()), int((mean < 0.5).sum())
    share = wilson(better, better + worse) if better + worse else None
    passed = _passed(kind, share, len(mean))
    return Control(kind, better, worse, len(mean), share, passed)  # type: ignore[arg-type]


def _passed(kind: str, share: Interval | None, n: int) -> bool:
    if kind == "itself":
        return n > 0 and (share is None or 0.5 in share)
    return share is not None and share.low > 0.5


def failed(controls: Sequence[Control]) -> tuple[str, ...]:
    """The kinds of `CONTROLS` that a judge did not pass or was not given.

    From the shares, for a file from before the rule has another `passed`.
    """
    passed = {each.kind for each in controls if _passed(each.kind, each.share, each.n)}
    return tuple(kind for kind in CONTROLS if kind not in passed)


def rates(controls: Sequence[Control]) -> bool:
    """Whether a judge with these controls may rate: it passed every one."""
    return not failed(controls)


def controls(
    prompts: Sequence[str], references: Sequence[str], *, seed: int
) -> dict[str, list[Shown]]:
    """Pairs of a real continuation and a worse one, by kind.

    "shuffled" has its words in random order, "other" is the continuation of the next prompt,
    "looped" its first words again and again, at most four and no more than half; "itself" is the
    real one. The two of a pair have equally many words, so that length tells nothing, and begin
    with the same blank: that of the real one, or a space where neither it nor the prompt has one.
    """
    rng = np.random.default_rng(seed)
    result: dict[str, list[Shown]] = {kind: [] for kind in CONTROLS}
    for i, (prompt, real) in enumerate(zip(prompts, references, strict=True)):
        words = real.split()
        lead = real[: len(real) - len(real.lstrip())]
        if not lead and not prompt[-1:].isspace():
            lead = " "
        loop = words[: max(1, min(_LOOP, len(words) // 2))]
        made = {
            "shuffled": rng.permutation(words).tolist(),
            "other": references[(i + 1) % len(references)].split(),
            "looped": loop * len(words),
            "itself": words,
        }
        for kind, worse in made.items():
            n = min(len(words), len(worse))
            texts = (lead + " ".join(each[:n]) for each in (words, worse))
            result[kind].append(Shown(prompt, *texts))
    return result


def _share(chosen: np.ndarray) -> Interval | None:
    return wilson(int(chosen.sum()), len(chosen)) if len(chosen) else None
