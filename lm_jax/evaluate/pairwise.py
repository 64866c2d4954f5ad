"""Pairwise judges: which of two continuations of a prompt is better, A, B or neither.

After appendix B.1 of the Prototype Transformer paper, which follows Chatbot Arena (Chiang et al.,
2024): a judge sees two responses and answers "A", "B" or "Tie" by coherence, relevance, fluency and
correctness. The wording of the prompt is ours. Every pair is shown in both orders (`both_orders`).

    tokens:FOLDER        the most likely of the three answers after the prompt, by a language model
    perplexity:FOLDER    the continuation of lower loss per token under a language model
    cached:FILE          answers from a file (`lm_jax.evaluate.answers`), whoever gave them
    chat:MODEL@URL       answers of a chat endpoint (`lm_jax.evaluate.chat`)
    null:KIND            no judgement: "first" names A, "coin" is random, "length" the longer one
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import os
import re
from typing import Literal, NamedTuple, Protocol

from lm_jax.errors import UsageError, nearest
from lm_jax.evaluate import chat, judge
from lm_jax.evaluate.answers import digest
from lm_jax.evaluate.framing import frame
from lm_jax.evaluate.multiple_choice import likelihood
from lm_jax.evaluate.multiple_choice.likelihood import Scorer
from lm_jax.run.files import load_json

Verdict = Literal["A", "B", "Tie"]
VERDICTS: tuple[Verdict, ...] = ("A", "B", "Tie")
NULLS = ("first", "coin", "length")
KINDS = (
    "tokens:FOLDER",
    "perplexity:FOLDER",
    "cached:FILE",
    "chat:MODEL@URL",
    *(f"null:{kind}" for kind in NULLS),
)
# A base model continues the prompt with its answer at the beginning of a line.
_OPENING = "\n\nAnswer:\n"
_PROMPT = """\
Two writers continued the same text. Say which continuation is better: the more coherent, the more \
relevant to the text, the more fluent, the more correct.

Text:
{prompt}

Continuation A:
{first}

Continuation B:
{second}

Answer with one word and nothing else: A if continuation A is better, B if continuation B is \
better, Tie if neither is."""


class Shown(NamedTuple):
    """A prompt with two continuations in the order in which a judge sees them."""

    prompt: str
    first: str
    second: str

    @property
    def swapped(self) -> "Shown":
        """The same prompt with its two continuations in the other order."""
        return Shown(self.prompt, self.second, self.first)


class PairJudge(Protocol):
    """Says which of two continuations is better."""

    @property
    def name(self) -> str:
        """The name of the judge in tables."""
        ...

    def verdicts(self, shown: Sequence[Shown]) -> list[Verdict | None]:
        """A verdict on each pair; None where there is no answer that can be read."""
        ...


@dataclasses.dataclass(frozen=True)
class NullJudge:
    """A judge that reads nothing: what a real one has to beat."""

    kind: str

    @property
    def name(self) -> str:
        """The name by which it is asked for."""
        return f"null:{self.kind}"

    def verdicts(self, shown: Sequence[Shown]) -> list[Verdict | None]:
        """Verdicts: always A for "first", by a digest of the texts for "coin", else by words."""
        return [self._verdict(each) for each in shown]

    def _verdict(self, shown: Shown) -> Verdict:
        if self.kind == "first":
            return "A"
        if self.kind == "coin":
            return "AB"[int(digest("\0".join(shown)), 16) % 2]  # type: ignore[return-value]
        return _larger(len(shown.first.split()), len(shown.second.split()))


@dataclasses.dataclass
class AskedJudge:
    """A judge that answers prompts in words; counts the answers that could not be read."""

    name: str
    ask: Callable[[str], str | None]
    unreadable: int = 0

    def verdicts(self, shown: Sequence[Shown]) -> list[Verdict | None]:
        """The verdict that each answer names."""
        return [self._verdict(each) for each in shown]

    def _verdict(self, shown: Shown) -> Verdict | None:
        answer = self.ask(prompt(shown))
        if answer is None:
            return None
        verdict = parse(answer)
        self.unreadable += verdict is None
        return verdict


@dataclasses.dataclass(frozen=True)
class TokensJudge:
    """The most likely of the three answers after the prompt, under a language model.

    It is deterministic, needs no sampling, and every prompt has a verdict.
    """

    name: str
    scorer: Scorer

    def verdicts(self, shown: Sequence[Shown]) -> list[Verdict | None]:
        """The answer of highest log-likelihood each."""
        tokenizer = self.scorer.tokenizer
        answers = [tuple(tokenizer.encode(one, add_special_tokens=False)) for one in VERDICTS]
        pairs = []
        for each in shown:
            context = tuple(frame(tokenizer, prompt(each), opening=_OPENING))
            pairs += [likelihood.Pair(context, answer) for answer in answers]
        if longest := max((len(pair.context) + 1 for pair in pairs), default=0):
            _check_fits(self.name, longest, self.scorer.max_length)
        scores = [score.log_likelihood for score in likelihood.score(self.scorer, pairs)]
        return [
            max(zip(scores[i : i + 3], VERDICTS, strict=True), key=lambda pair: pair[0])[1]
            for i in range(0, len(scores), 3)
        ]


@dataclasses.dataclass(frozen=True)
class PerplexityJudge:
    """The continuation of lower loss per token, under a language model.

    Without a prompt to answer it has no bias of position. It favours what a language model finds
    likely, which text that repeats itself is.
    """

    name: str
    scorer: Scorer

    def verdicts(self, shown: Sequence[Shown]) -> list[Verdict | None]:
        """The verdict by mean negative log-likelihood; a continuation without a token loses."""
        texts = dict.fromkeys(
            (each.prompt, text) for each in shown for text in (each.first, each.second)
        )
        pairs = {
            key: likelihood.pair(self.scorer.tokenizer, *key) for key in texts if key[1].strip()
        }
        scores = likelihood.score(self.scorer, list(pairs.values()))
        mean = {
            key: score.log_likelihood / len(pair.continuation)
            for (key, pair), score in zip(pairs.items(), scores, strict=True)
        }
        return [
            _larger(
                mean.get((each.prompt, each.first), -math.inf),
                mean.get((each.prompt, each.second), -math.inf),
            )
            for each in shown
        ]


def build(
    name: str,
    *,
    scorer: Callable[[str], tuple[str, Scorer]],
    answers: str | os.PathLike[str] | None = None,
) -> PairJudge:
    """The judge of a name, one of those at the head of this file.

    Args:
      name: name of the judge.
      scorer: a function from FOLDER to the name of the language model there and the model.
      answers: file to which the answers of an endpoint are added.

    Raises:
      UsageError: an unknown name.
      BadInputError: the file or the model cannot be used.
    """
    kind, _, place = check(name)
    if kind == "null":
        return NullJudge(place)
    if kind == "cached":
        cached = judge.cached(place)
        return AskedJudge(cached.name, cached.ask)
    if kind == "chat":
        return AskedJudge(*chat.endpoint(place, answers=answers))
    model, scored = scorer(place)
    made = TokensJudge if kind == "tokens" else PerplexityJudge
    return made(f"{kind}:{model}", scored)


def check(name: str) -> tuple[str, str, str]:
    """The kind, the colon and the place of a judge's name.

    Raises:
      UsageError: it is unknown.
    """
    kind, colon, place = name.partition(":")
    known = {each.partition(":")[0] for each in KINDS}
    if kind not in known or not place or (kind == "null" and place not in NULLS):
        raise UsageError(f"judge = {name!r} is unknown{nearest(name, KINDS)}")
    if kind == "chat":
        chat.split_place(place)
    return kind, colon, place


def both_orders(judged: PairJudge, shown: Sequence[Shown]) -> list[tuple[Verdict | None, ...]]:
    """The verdicts on each as it is shown, and with its continuations swapped."""
    verdicts = judged.verdicts([*shown, *(each.swapped for each in shown)])
    return list(zip(verdicts[: len(shown)], verdicts[len(shown) :], strict=True))


def prompt(shown: Shown) -> str:
    """The question about two continuations, whose lines are joined."""
    return _PROMPT.format(
        **{name: " ".join(text.split()) for name, text in shown._asdict().items()}
    )


def parse(answer: str) -> Verdict | None:
    """The verdict that an answer names: one word, or a JSON object with "verdict"; else None.

    Fences, quotes, brackets, stars and a full stop around the word are ignored.
    """
    text = re.sub(r"```(?:json)?", "", answer).strip()
    if text.startswith("{"):
        try:
            text = load_json(text)["verdict"].strip()
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    word = text.strip(" \t\r\n\"'`*[]().").lower()
    return {one.lower(): one for one in VERDICTS}.get(word)


def _larger(first: float, second: float) -> Verdict:
    if first == second:
        return "Tie"
    return "A" if first > second else "B"


def _check_fits(name: str, length: int, most: int) -> None:
    if length > most:
        raise UsageError(
            f"judge = {name!r} reads {most} tokens, and a question has {length}; give a model of "
            "longer context, or fewer --prompt_tokens"
        )
