"""An example of a circuit task as ids of one tokenizer, or the reason why it does not fit.

It fits if its two prompts have as many tokens, so that positions correspond, and every continuation
follows the prompt as one token. That is the token that it has after the prompt when both are
encoded as one text. Digits that go on with a number at the end of the prompt are their own tokens
instead (`continued_number`): with GPT-2's vocabulary "17" is followed by the token "76", though
" 1776" is one token when it is written as a whole.

Continuations of several tokens (`answer` of "tokens", as in a user's file) fit as well. The tokens
of the longest right one, but for its last, are appended to both prompts. The other right ones may
end elsewhere along it, and a wrong one is read where it leaves it (`metrics.Path`).

Two-digit continuations may be two tokens of one digit each (`metrics`): then the clean number's
tens digit is appended to both prompts, and the continuation is read at two positions. For a task
of years (`answer` of "number"), the year in each prompt must be the tokens of the century that ends
the prompt and those of its two digits, as the continuations are; an example with a year that is
encoded otherwise, such as " 1776", does not fit (Hanna et al. 2023, whose examples are chosen so).
"""

import dataclasses
import re

from lm_jax.errors import BadInputError
from lm_jax.text.tokenizer import Tokenizer, added_tokens, continued_number
from sparse_jax.circuits.generators import Answer, Example


@dataclasses.dataclass(frozen=True)
class EncodedExample:
    """One example as ids; `second` continuations follow the tens digit that ends the prompts.

    Attributes:
      clean, corrupt: prompts with the tokens of continuations that end them.
      answers, wrong: ids of continuations of one token.
      second_answers, second_wrong: ids after a tens digit.
      path: tokens that lead from each position to the next, and -1 at the last; empty for
        continuations of one token and numbers.
      path_answers, path_wrong: ids with which continuations end at each position of the path.
    """

    clean: list[int]
    corrupt: list[int]
    answers: list[int]
    wrong: list[int]
    second_answers: list[int]
    second_wrong: list[int]
    path: list[int] = dataclasses.field(default_factory=list)
    path_answers: list[list[int]] = dataclasses.field(default_factory=list)
    path_wrong: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def appended(self) -> int:
        """Tokens of continuations at the end of the prompts."""
        return len(self.path) - 1 if self.path else int(bool(self.second_wrong))


class UnfitError(Exception):
    """An example that does not fit the tokenizer.

    The message is the reason, by which dropped examples are counted; `remedy` is what to change in
    this one, with its numbers, for whoever wrote it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def encode(
    example: Example, tokenizer: Tokenizer, answer: Answer, max_length: int | None
) -> EncodedExample:
    """The example as ids.

    Args:
      example: prompts and continuations as text.
      tokenizer: tokenizer of the model.
      answer: what its continuations are; those of a "number" may be two tokens of one digit each,
        and "tokens" are any number of them.
      max_length: positions of the model; None for no limit.

    Raises:
      UnfitError: with the reason.
    """
    before, _ = added_tokens(tokenizer)
    clean, corrupt = (
        [*before, *tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)]
        for text in (example.clean, example.corrupt)
    )
    if not example.answers or not example.wrong_answers:
        raise UnfitError(
            "it has no right or no wrong continuation",
            "write one or more in both answers and wrong_answers",
        )
    right, wrong = (
        [_continuation(tokenizer, example.clean, len(before), clean, text) for text in texts]
        for texts in (example.answers, example.wrong_answers)
    )
    if answer == "number":
        _check_years(example, tokenizer, clean, corrupt, wrong)
    if len(clean) != len(corrupt):
        raise UnfitError(
            "clean and corrupt prompts differ in their number of tokens",
            f"they have {len(clean)} and {len(corrupt)}; change words until both have as many",
        )
    if clean == corrupt:
        raise UnfitError(
            "clean and corrupt prompts are the same tokens",
            "write a corrupt prompt with another answer",
        )
    sizes = {len(ids) for ids in [*right, *wrong]}
    if sizes == {1}:
        row = EncodedExample(clean, corrupt, [i for (i,) in right], [i for (i,) in wrong], [], [])
    elif answer == "number" and sizes == {2}:
        row = _encode_digits(clean, corrupt, right, wrong)
    elif answer == "tokens":
        row = _encode_path(clean, corrupt, right, wrong)
    else:
        texts = [*example.answers, *example.wrong_answers]
        text, ids = next(
            each for each in zip(texts, [*right, *wrong], strict=True) if len(each[1]) > 1
        )
        raise UnfitError(
            "a continuation is more than one token",
            f"{text!r} has {len(ids)}; write a word that is one token with its leading space",
        )
    if set(row.answers) & set(row.wrong) or set(row.second_answers) & set(row.second_wrong):
        raise UnfitError(
            "a right continuation is also a wrong one", "write continuations of different tokens"
        )
    if max_length is not None and len(row.clean) > max_length:
        raise UnfitError(
            f"it is longer than the {max_length} positions of the model",
            f"it has {len(row.clean)} tokens; write shorter prompts",
        )
    return row


def continuation_token(tokenizer: Tokenizer, prompt: str, text: str) -> int:
    """The id of a continuation that is one token after a prompt.

    Raises:
      BadInputError: it is none.
    """
    before, _ = added_tokens(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False, split_special_tokens=True)
    try:
        full = _continuation(tokenizer, prompt, len(before), [*before, *ids], text)
        if len(full) > 1:
            raise UnfitError(
                f"it is {len(full)} tokens", "write it with its leading space, or give another"
            )
    except UnfitError as reason:
        raise BadInputError(
            f"target {text!r} is not one token after {prompt!r} ({reason}); {reason.remedy}"
        ) from reason
    return full[0]


def _continuation(
    tokenizer: Tokenizer, prompt: str, added: int, ids: list[int], text: str
) -> list[int]:
    if ids and (number := continued_number(tokenizer, prompt, ids[-1], text)):
        return number
    full = tokenizer.encode(prompt + text, add_special_tokens=False, split_special_tokens=True)
    if full[: len(ids) - added] != ids[added:]:
        raise UnfitError(
            "a continuation fuses with the end of the prompt",
            f"write {text!r} with a leading space, and the prompt without one at its end",
        )
    if len(full) == len(ids) - added:
        raise UnfitError("a continuation gives no token", f"{text!r} needs a word")
    return full[len(ids) - added :]


def _check_years(
    example: Example,
    tokenizer: Tokenizer,
    clean: list[int],
    corrupt: list[int],
    wrong: list[list[int]],
) -> None:
    """Checks that the years in the prompts are tokens of the century and of two digits.

    That of the clean prompt is the greatest wrong number, and that of the corrupt one another.
    """
    century = re.findall(r"\d*$", example.clean)[0]
    size = _size_of_end(tokenizer, clean, century)
    years = ((clean, example.clean, wrong[-1:]), (corrupt, example.corrupt, wrong[:-1]))
    for ids, prompt, digits in years:
        # What ends the corrupt prompt, too.
        wanted = [[*ids[len(ids) - size :], *each] for each in digits]
        if not any(_holds(ids[: len(ids) - size], each) for each in wanted):
            year = re.findall(rf"{century}\d\d", prompt)[0] if century else ""
            which = (
                f"its year, in the {century}00s," if ids is clean else f"the corrupt year {year}"
            )
            raise UnfitError(
                f"{which} is not encoded as its century and two digits",
                f"the tokenizer divides {year!r} otherwise; write another year",
            )


def _size_of_end(tokenizer: Tokenizer, ids: list[int], text: str) -> int:
    """The number of tokens at the end of ids that spell a text, without white space; 0 if none."""
    spelled = ""
    for size, i in enumerate(reversed(ids), 1):
        spelled = tokenizer.decode([i]).strip() + spelled
        if len(spelled) >= len(text):
            return size if spelled == text else 0
    return 0


def _holds(ids: list[int], part: list[int]) -> bool:
    """Whether a part of some ids is these, one after the other."""
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


def _encode_digits(
    clean: list[int], corrupt: list[int], right: list[list[int]], wrong: list[list[int]]
) -> EncodedExample:
    """Two-digit numbers of one token a digit; those above are right, the others wrong.

    A tens digit decides unless it is that of the greatest wrong number, where the units decide.
    """
    tens = wrong[-1][0]
    first_right, first_wrong = ({ids[0] for ids in side} - {tens} for side in (right, wrong))
    if first_right & first_wrong:
        raise UnfitError(
            "a tens digit is both right and wrong", "write all numbers up to one as wrong"
        )
    return EncodedExample(
        [*clean, tens],
        [*corrupt, tens],
        sorted(first_right),
        sorted(first_wrong),
        [ids[1] for ids in right if ids[0] == tens],
        [ids[1] for ids in wrong if ids[0] == tens],
    )


def _encode_path(
    clean: list[int], corrupt: list[int], right: list[list[int]], wrong: list[list[int]]
) -> EncodedExample:
    """Continuations of several tokens, along the longest right one."""
    longest = max(right, key=len)
    answers: list[list[int]] = [[] for _ in longest]
    for ids in right:
        if ids[:-1] != longest[: len(ids) - 1]:
            raise UnfitError(
                "right continuations part before their last token",
                "write those of one beginning, and the others in lines of their own",
            )
        answers[len(ids) - 1].append(ids[-1])
    leaving: list[list[int]] = [[] for _ in longest]
    for ids in wrong:
        at = next((k for k, (a, b) in enumerate(zip(ids, longest, strict=False)) if a != b), None)
        if at is None or ids[at] in answers[at]:
            raise UnfitError(
                "a right continuation begins a wrong one, or the other way round",
                "write continuations that part at some token",
            )
        leaving[at].append(ids[at])
    if any(longest[k] in answers[k] for k in range(len(longest) - 1)):
        raise UnfitError("a right continuation begins another one", "leave the longer one out")
    forced = longest[:-1]
    return EncodedExample(
        [*clean, *forced],
        [*corrupt, *forced],
        answers=answers[0],
        wrong=leaving[0],
        second_answers=[],
        second_wrong=[],
        path=[*forced, -1],
        path_answers=[list(dict.fromkeys(ids)) for ids in answers],
        path_wrong=[list(dict.fromkeys(ids)) for ids in leaving],
    )
