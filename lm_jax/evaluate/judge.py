"""Judges: another model names and scores the theme that some texts share.

The texts are those that a part of a model, such as a prototype or a feature, answers to most.

After section 5.1 and appendix A.10 of the paper, which describe the idea (automated interpretation,
Bricken et al., 2023; Paulo et al., 2024) and its rubric; the wording of the prompt is ours.

1. `prompt` lists these texts, with their strongest words marked.
2. A judge answers it. `build_judge` knows four: "null" gives no labels, "cached:FILE" looks the
   answer up, "local:FOLDER" runs a language model on this machine, "chat:MODEL@URL" asks an
   endpoint that the user names. Any object with `name` and `label` can be a judge too.
3. `parse` reads the one JSON object of the answer, which may be fenced or have words around it, as
   chat models write it. An answer that cannot be read is counted and gives no label.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
from pathlib import Path
from typing import Protocol

from absl import logging
import jax

from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.evaluate import chat
from lm_jax.evaluate.answers import Answers, append, digest
from lm_jax.evaluate.framing import frame, stop_ids
from lm_jax.evaluate.judge_answer import Label, parse
from lm_jax.evaluate.judge_prompt import MARKED, MOST_TEXTS, RUBRIC, MarkedText, prompt
from lm_jax.model.decode import generate
from lm_jax.model.sampling import Sampling
from lm_jax.run import stop as stop_flag
from lm_jax.run.finished import file_inputs
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import is_there, load_pretrained, open_pretrained

KINDS = ("null", "cached:FILE", "local:FOLDER", "chat:MODEL@URL")
GREEDY = Sampling()
# The most tokens of a local judge's answer; the released script allows 756.
MAX_NEW_TOKENS = 256
# Prompts of a local model are padded to multiples of this, as each length compiles a program.
_LENGTH_STEP = 64


class Judge(Protocol):
    """Names the theme of texts."""

    @property
    def name(self) -> str:
        """The name of the judge in the report."""
        ...

    def label(self, texts: Sequence[MarkedText]) -> Label | None:
        """The label of these texts, strongest first, or None."""
        ...


@dataclasses.dataclass(frozen=True)
class NullJudge:
    """Gives no labels."""

    name: str = "null"

    def label(self, texts: Sequence[MarkedText]) -> None:
        """Returns None, which is no label."""
        del texts


@dataclasses.dataclass
class PromptedJudge:
    """A judge that calls a function from a prompt to an answer, or to None where there is none.

    Counts the prompts, those without an answer, and the answers that could not be read.

    Attributes:
      rubric: what precedes the texts in a prompt; "{count}" in it becomes their number.
      marked: share of a text's words that is marked.
      most_texts: the most texts of a prompt, the first ones.
    """

    name: str
    ask: Callable[[str], str | None]
    rubric: str = RUBRIC
    marked: float = MARKED
    most_texts: int = MOST_TEXTS
    asked: int = 0
    unanswered: int = 0
    unreadable: int = 0

    def label(self, texts: Sequence[MarkedText]) -> Label | None:
        """The parsed answer; None, counted and logged, where it is missing or does not parse."""
        if not texts:
            return None
        self.asked += 1
        answer = self.ask(
            prompt(texts, self.rubric, marked=self.marked, most_texts=self.most_texts)
        )
        if answer is None:
            self.unanswered += 1
            return None
        try:
            return parse(answer)
        except BadInputError as error:
            self.unreadable += 1
            logging.warning("%s: %s", self.name, error)
            return None

    def summary(self) -> str:
        """One sentence on how many sets of texts were labelled."""
        labelled = self.asked - self.unanswered - self.unreadable
        return (
            f"{self.name} labelled {labelled} of {self.asked}: {self.unanswered} had no answer, "
            f"{self.unreadable} answers were not the requested JSON."
        )


def build_judge(
    name: str,
    *,
    answers: str | os.PathLike[str] | None = None,
    rubric: str = RUBRIC,
    marked: float = MARKED,
    most_texts: int = MOST_TEXTS,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
) -> Judge:
    """The judge of that name.

    Args:
      name: "null"; "cached:FILE", a file of answers (`Answers`), in which a missing answer is no
        label and its prompt is written to FILE.missing; "local:FOLDER", a model that
        `lm_jax.load_pretrained` takes; "chat:MODEL@URL", an endpoint (`chat`).
      answers: file to which a judge adds the answers that it gave or looked up, with what they are
        about (`answers.about`), and where a local judge and an endpoint find those of an
        interrupted run; None for no file.
      rubric: what precedes the texts in a prompt, such as `judge_prompt.read_rubric` reads.
      marked: share of a text's words that is marked, the strongest ones.
      most_texts: the most texts of a prompt, the first ones.
      temperature: temperature at which a local judge or an endpoint samples its answer; 0 is
        greedy.
      max_new_tokens: the most tokens of such an answer; None for `MAX_NEW_TOKENS` of a local judge
        and no limit of an endpoint.

    The name of the judge has what differs from the defaults, but for the rubric.

    Raises:
      UsageError: `name` is not one of the four, a setting is out of range, or a temperature or
        number of tokens is given for a judge that generates nothing.
      BadInputError: the file or the model cannot be used.
    """
    check_judge(
        name,
        marked=marked,
        most_texts=most_texts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    kind, _, place = name.partition(":")
    sampling = Sampling(temperature)
    match kind:
        case "cached":
            judge = cached(place, answers=answers)
        case "local":
            most = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
            judge = local(place, answers=answers, sampling=sampling, max_new_tokens=most)
        case "chat":
            asked = chat.endpoint(
                place, answers=answers, temperature=temperature, max_tokens=max_new_tokens
            )
            judge = PromptedJudge(*asked)
        case _:
            return NullJudge()
    own = [judge.name]
    if marked != MARKED:
        own.append(f"{marked:g} of the words marked")
    if most_texts != MOST_TEXTS:
        own.append(f"at most {most_texts} texts")
    return dataclasses.replace(
        judge, name=", ".join(own), rubric=rubric, marked=marked, most_texts=most_texts
    )


def _check_settings(marked: float, most_texts: int, max_new_tokens: int | None) -> None:
    problems = []
    if not 0 < marked <= 1:
        problems.append(f"marked = {marked} must be a share of the words, above 0 and at most 1")
    if most_texts < 1:
        problems.append(f"most_texts = {most_texts} must be at least 1")
    if max_new_tokens is not None and max_new_tokens < 1:
        problems.append(f"max_new_tokens = {max_new_tokens} must be at least 1")
    if problems:
        raise UsageError("; ".join(problems))


def check_judge(
    name: str,
    *,
    marked: float = MARKED,
    most_texts: int = MOST_TEXTS,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
) -> None:
    """Refuses what `build_judge` would refuse, without reading the weights of a model.

    Raises:
      As `build_judge`.
    """
    _check_name(name)
    _check_settings(marked, most_texts, max_new_tokens)
    kind = name.partition(":")[0]
    if kind == "null" and (marked, most_texts) != (MARKED, MOST_TEXTS):
        raise UsageError(
            "judge = 'null' reads no texts: leave out how many, and the share that is marked"
        )
    is_default = Sampling(temperature) == GREEDY and max_new_tokens is None
    if kind in ("null", "cached") and not is_default:
        raise UsageError(
            f"judge = {name!r} generates nothing: leave out temperature and number of tokens, or "
            "name local:FOLDER or chat:MODEL@URL"
        )


def _check_name(name: str) -> None:
    kind, colon, place = name.partition(":")
    if name == "null":
        return
    if kind == "cached" and place:
        _answer_file(place)
    elif kind == "local" and place:
        _with_tokenizer(place, open_pretrained(place).tokenizer)
    elif kind == "chat" and place:
        chat.split_place(place)
    else:
        raise UsageError(f"judge = {name!r} is unknown{nearest(kind + colon, KINDS)}")


def judge_inputs(name: str) -> dict[str, str]:
    """What decides the answers of a judge besides its name: a model, or a file of answers.

    One that is gone is left out, as in `lm_jax.weights.load.identities`.
    """
    kind, _, place = name.partition(":")
    if kind == "local":
        if not is_there(place):
            return {}
        return {f"judge {name}": open_pretrained(place).identity.chat_text}
    return file_inputs({f"judge {name}": published.resolve_file(place)} if kind == "cached" else {})


def cached(
    file: str | os.PathLike[str], *, answers: str | os.PathLike[str] | None = None
) -> PromptedJudge:
    """A judge that only looks answers up; FILE.missing lists the prompts that had none.

    Those that it finds are added to the file `answers`, if one is named, with the judge of their
    line or, where that names none, the name of this one.
    """
    file = _answer_file(file)
    stored = Answers(file)
    used = None if answers is None or Path(answers).resolve() == file.resolve() else Path(answers)
    kept = None if used is None else Answers(used)
    name = f"cached:{file.name}"
    missing = file.with_name(f"{file.name}.missing")
    missing.unlink(missing_ok=True)

    def ask(text: str) -> str | None:
        answer = stored.find(text)
        if answer is None:
            append(missing, {"prompt_sha256": digest(text), "prompt": text})
        elif kept is not None and kept.find(text) != answer:
            kept.add(text, answer, judge=stored.judge_of(text) or name)
        return answer

    return PromptedJudge(name, ask)


def local(
    source: str | Path,
    *,
    answers: str | os.PathLike[str] | None = None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> PromptedJudge:
    """A judge that runs a language model on this machine, greedily unless `sampling` differs.

    A chat model is prompted in its own template. A base model continues the prompt, and its answer
    ends with the first "}", because it does not stop by itself. A prompt whose answer by the same
    model is in `answers` is not asked again.

    The model must be large enough to follow the requested format: no answer of SmolLM2-135M could
    be read.
    """
    model = load_pretrained(source)
    how = "" if sampling == GREEDY else f", {sampling}"
    if max_new_tokens != MAX_NEW_TOKENS:
        how += f", {max_new_tokens} tokens"
    name = f"local:{Path(source).name} ({model.identity.digest[:12]}{how})"
    stored = None if answers is None else Answers(answers)
    tokenizer = _with_tokenizer(source, model.tokenizer)

    def ask(text: str) -> str:
        known = stored.find(text, judge=name) if stored else None
        if known is not None:
            return known
        stop_flag.check("while asking the judge")
        stops = stop_ids(tokenizer)
        # A random key per prompt, so that the order of the prompts does not matter.
        key = jax.random.key(int(digest(text)[:8], 16))
        (answer_ids,) = generate(
            model.params,
            [frame(tokenizer, text, opening="\nJSON: ")],
            model.cfg,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            stop_id=stops,
            length_step=_LENGTH_STEP,
        )
        if answer_ids[-1] in stops:
            answer_ids = answer_ids[:-1]
        answer = tokenizer.decode(answer_ids, skip_special_tokens=True)
        if tokenizer.chat_template is None:
            head, brace, _ = answer.partition("}")
            answer = head + brace
        if stored:
            stored.add(text, answer, judge=name)
        return answer

    return PromptedJudge(name, ask)


def _answer_file(file: str | os.PathLike[str]) -> Path:
    file = published.resolve_file(file)
    if not file.is_file():
        raise BadInputError(
            f"{file} is not a file of answers; name one, or create an empty one to collect the "
            f"prompts{published.hint(file)}"
        )
    return file


def _with_tokenizer(source: str | Path, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise BadInputError(f"{source} holds no tokenizer; put its tokenizer.json there")
    return tokenizer
