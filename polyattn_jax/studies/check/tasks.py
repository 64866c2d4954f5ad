"""The tasks that a check asks: which there are, their prompts and controls, and what they show.

    needle, two_needles, induction, mqar, copying, ...   a suite of `suites.named`
    prompts:FILE                                         prompts of the user (`suites.load_jsonl`)
    choices:NAME                                         multiple choice, such as choices:arc_easy

A task decides if softmax solves it: with an accuracy of one half or more, a higher one than in its
control (`suites.control`), and a higher one than whoever always gives the most frequent answer; of
multiple choice, with an accuracy that is further above guessing than a recipe may lose. Any other
is undecidable: keeping its accuracy would say nothing.
"""

from collections import Counter
import dataclasses
import math
from pathlib import Path
from typing import Literal, cast

import numpy as np

from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice import TASKS
from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.report import slug
from lm_jax.statistics import Interval
from polyattn_jax.audit import decision, stages
from polyattn_jax.audit import multiple_choice as choices
from polyattn_jax.audit.audit_suites import haystack, naming
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.head_sets import right
from polyattn_jax.audit.opening import OpenAudit, Suites
from polyattn_jax.audit.results import ConditionResult, VerdictName
from polyattn_jax.recipes.row_maps import SOFTMAX, Calibrated, Recipe
from polyattn_jax.suites import control, load_jsonl, named
from polyattn_jax.suites.chat import in_chat
from polyattn_jax.suites.needle_file import NeedleFile
from polyattn_jax.suites.niah import needle_words

Kind = Literal["suite", "prompts", "choices"]
# Short names of suites.
ALIASES = {"niah": "needle", "copy": "copying", "passkey": "pass_key"}
# The most prompts of a control.
MOST_CONTROL = 50
_NAMES = (*named.NAMES, *ALIASES)


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of a check.

    Attributes:
      kind: what it is made of.
      source: name of the suite, file of the prompts, or name of the questions.
    """

    kind: Kind
    source: str

    @property
    def name(self) -> str:
        """The task as `--task` takes it."""
        return self.source if self.kind == "suite" else f"{self.kind}:{self.source}"

    def key(self, length: int) -> str:
        """The name of its prompts in the tables of a check."""
        if self.name == "needle":
            return named.key("niah", length)
        if self.kind == "suite":
            return named.key(self.source, length)
        return f"{self.kind}_{slug(Path(self.source).stem)}"


def parse_task(text: str) -> Task:
    """The task that `--task` names.

    Raises:
      UsageError: the name of no task.
    """
    kind, colon, source = text.partition(":")
    if not colon:
        name = ALIASES.get(text, text)
        if name not in named.NAMES:
            raise UsageError(
                f"--task={text} is no task{nearest(text, _NAMES)}; it is one of "
                f"{', '.join(named.NAMES)}, prompts:FILE or choices:NAME"
            )
        return Task("suite", name)
    if kind not in ("prompts", "choices") or not source:
        raise UsageError(f"--task={text} is no task; write prompts:FILE or choices:NAME")
    if kind == "choices" and source not in TASKS:
        raise UsageError(
            f"--task={text}: there are no questions {source!r}{nearest(source, TASKS)}"
        )
    return Task(cast(Kind, kind), source)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The prompts of the tasks that can be asked, and why others cannot.

    Attributes:
      suites: prompts by key.
      controls: control prompts by key; none where no prompt has another answer to be asked for.
      refused: reason by the name of a task that this model cannot be asked.
    """

    suites: Suites
    controls: Suites
    refused: dict[str, str]

    @property
    def with_controls(self) -> Suites:
        """Prompts and controls by their names in the tables of a check."""
        return self.suites | {control_key(key): suite for key, suite in self.controls.items()}


def build(
    audited: AuditedModel,
    tasks: tuple[Task, ...],
    *,
    length: int,
    n: int,
    chat: bool = False,
    words: NeedleFile | None = None,
) -> Asked:
    """The prompts of all tasks but multiple choice.

    Args:
      audited: the model, with its tokenizer and the settings of the audit.
      tasks: tasks in their order.
      length: tokens of a prompt, where the task can have any number.
      n: prompts of each task.
      words: words and frame of the task "needle"; None for the shipped ones.
      chat: whether they are messages in the model's chat template, which makes them longer.

    Raises:
      BadInputError: the model is too short, or a file of the user does not fit the tokenizer.
      UsageError: the length is too short for a task.
    """
    config, tokenizer = audited.config, audited.tokenizer
    longest = audited.model.cfg.max_length
    if length > longest and any(task.kind == "suite" for task in tasks):
        raise BadInputError(
            f"--length={length}: the model has {longest} positions; give that or less, or a model "
            "with a longer context"
        )
    if chat and tokenizer.chat_template is None:
        raise BadInputError(f"--chat: {config.model} has no chat template; leave --chat out")
    if words is not None and any(task.source == "needle" for task in tasks):
        with naming("--needle_words"):
            # Its words are the argument `nouns` of the suite.
            needle_words(tokenizer, words.words, cue=words.cue, end=words.end)
    asked = Asked({}, {}, {})
    for task in tasks:
        if task.kind == "choices":
            continue
        try:
            if task.kind == "prompts":
                suite = load_jsonl(task.source, tokenizer, max_length=longest)
            else:
                with naming("--length"):
                    suite = named.build(
                        task.source,
                        tokenizer,
                        haystack=haystack(config.haystack),
                        length=length,
                        n=named.available(task.source, n),
                        seed=config.seed,
                        max_length=longest,
                        words=words,
                    )
            if chat:
                suite = in_chat(suite, tokenizer, max_length=longest)
        except BadInputError as error:
            if task.kind == "prompts":
                raise
            asked.refused[task.name] = str(error)
            continue
        key = task.key(length)
        asked.suites[key] = suite
        made = control.control(suite, tokenizer, MOST_CONTROL)
        if made is not None:
            asked.controls[key] = made
    return asked


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to one task, with softmax and with the recipe in every head.

    Attributes:
      control: accuracy of softmax in the control, or of guessing; None without one.
      answers: what the control asks for (`suites.control.kind`), or "guessed".
      tokens: tokens of the longest prompt; 0 of multiple choice.
      most_frequent: share of the prompts that have the most frequent answer; 0 of multiple choice.
      floor: accuracy that softmax must be shown to have.
      most: the most prompts that the task has, if it has no more.
    """

    softmax: ConditionResult
    recipe: ConditionResult
    control: Interval | None
    answers: str
    tokens: int
    most_frequent: float = 0.0
    floor: float = decision.SOLVED
    most: int | None = None

    @property
    def unsolved(self) -> str:
        """Why softmax is not shown to solve the task; empty if it is."""
        own, other = self.softmax.accuracy, self.control
        correct, n = right(own), own.n
        counted = f"softmax is right in {correct} of {n} prompts"
        if self.answers == GUESSED:
            if not decision.solves(correct, n, floor=self.floor):
                return (
                    f"{counted}, which is not shown to be further above guessing than a recipe "
                    "may lose"
                )
            return ""
        if other is None:
            return (
                "no prompt has another answer of as many tokens to be asked for, so that no "
                "control tells what is read"
            )
        if not decision.solves(correct, n):
            return f"{counted}, which does not show that it solves the task"
        if self.most_frequent >= own.low:
            share = f"{100 * self.most_frequent:.0f} %"
            return f"{counted}, and whoever always gives the most frequent answer in {share}"
        if other.high >= own.low:
            found = f"{right(other)} of {other.n}"
            return f"{counted}, and gives {found} answers that are {_WITHOUT[self.answers]}"
        return ""


GUESSED = "guessed"
_WITHOUT = {
    control.LEFT_OUT: "left out of the prompt",
    control.OTHERS: "those to other prompts",
}


def ask(
    opened: OpenAudit,
    task: Task,
    asked: Asked,
    calibrated: Calibrated,
    recipe: Recipe,
    *,
    length: int,
    heads_LN: np.ndarray | None = None,
) -> Answers:
    """Asks or resumes one task with softmax and the recipe, and its control with softmax.

    Args:
      opened: the model, the prompts and the stores.
      task: task of `asked`.
      asked: prompts and controls.
      calibrated: biases, as `resolve_bias` takes them.
      recipe: the recipe.
      length: tokens of a prompt, where the task can have any number.
      heads_LN: heads that have the recipe; None for all.
    """
    audited, key = opened.model, task.key(length)
    # The stage of an audit's needles has this name.
    stage = "sweep" if task.name == "needle" else key
    conditions = stages.sweep_conditions(audited, calibrated, stage, heads_LN=heads_LN)
    by_cell = opened.evaluate(conditions, key)
    return answers_of(
        opened, task, asked, calibrated, by_cell[SOFTMAX.name], by_cell[recipe.name], length=length
    )


def answers_of(
    opened: OpenAudit,
    task: Task,
    asked: Asked,
    calibrated: Calibrated,
    softmax: ConditionResult,
    recipe: ConditionResult,
    *,
    length: int,
) -> Answers:
    """Answers to one task with its control, which softmax is asked for, or was.

    Args:
      opened, task, asked, calibrated, length: arguments of `ask`.
      softmax, recipe: results on the prompts of the task.
    """
    audited, key = opened.model, task.key(length)
    accuracy = None
    if key in asked.controls:
        of_control = stages.sweep_conditions(audited, calibrated, f"control of {key}")[:1]
        own = opened.evaluate(of_control, control_key(key))
        accuracy = own[SOFTMAX.name].accuracy
    suite = asked.suites[key]
    counts = Counter(prompt.target for prompt in suite.prompts)
    return Answers(
        softmax=softmax,
        recipe=recipe,
        control=accuracy,
        answers=control.kind(suite),
        tokens=max(len(prompt.tokens) for prompt in suite.prompts),
        most_frequent=max(counts.values()) / len(suite.prompts),
        most=named.most(task.source) if task.kind == "suite" else None,
    )


def control_key(key: str) -> str:
    """The name of a control in the tables of a check."""
    return f"{key}_control"


def choose(
    opened: OpenAudit,
    tasks: tuple[Task, ...],
    calibrated: Calibrated,
    recipe: Recipe,
    *,
    n: int,
    heads_LN: np.ndarray | None = None,
) -> dict[str, Answers]:
    """Asks or resumes the tasks of multiple choice; the answers by the name of the task.

    Args:
      opened, calibrated, recipe, heads_LN: arguments of `ask`.
      tasks: all tasks of the check.
      n: questions of each.
    """
    names = [task.source for task in tasks if task.kind == "choices"]
    if not names:
        return {}
    conditions = stages.sweep_conditions(opened.model, calibrated, "choices", heads_LN=heads_LN)
    questions = multiple_choice.read_tasks(names, limit=n)
    results = choices.evaluate(opened.model, opened.folder, conditions, questions)
    tolerance = opened.model.config.tolerance
    return {
        Task("choices", name).name: _chosen(result, conditions, recipe, tolerance)
        for name, result in results.items()
    }


def _chosen(
    task: ChoiceTask, conditions: list[stages.Condition], recipe: Recipe, tolerance: float
) -> Answers:
    """The answers to one task of multiple choice, by the log-likelihood of whole choices."""
    metric = task.metrics["acc"]
    before = metric.accuracy[SOFTMAX.name]
    # A recipe that guesses must lose more than the tolerance.
    floor = task.chance + tolerance
    results = {}
    for condition in conditions:
        accuracy = metric.accuracy[condition.name]
        paired = metric.paired.get(condition.name)
        change = Interval(0.0, 0.0, 0.0, task.n) if paired is None else paired.change
        lost, won = (0, 0) if paired is None else (paired.lost, paired.gained)
        p_value = 1.0 if paired is None else paired.p_value
        name: VerdictName = "undecided"
        if decision.solves(right(before), task.n, floor=floor):
            name = decision.of_change(
                change, lost=lost, won=won, p_value=p_value, tolerance=tolerance
            )
        results[condition.name] = ConditionResult(
            cell=condition.name,
            recipe=condition.recipe.name,
            bias=condition.one_bias,
            heads=int(condition.heads_LN.sum()),
            accuracy=accuracy,
            verdict=name,
            delta=change,
            p_value=p_value,
            lost=lost,
            won=won,
            loss=math.nan,
            median_rank=math.nan,
            dead_rows_per_prompt=math.nan,
        )
    chance = Interval(task.chance, task.chance, task.chance, task.n)
    return Answers(results[SOFTMAX.name], results[recipe.name], chance, GUESSED, 0, floor=floor)
