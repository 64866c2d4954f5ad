"""Circuit tasks as aligned token arrays: clean and corrupt prompts, answers, metric positions.

    task = make_task("ioi", tokenizer, count=20, seed=0)
    task = load_task("my_task.jsonl", tokenizer)
    task.arrays.clean_BT, task.manifest.dropped

Examples that do not fit a tokenizer (`encoding`) are dropped and counted by reason.

A user's task is a file of JSON lines with the fields of `Example`; there, every fault is an error
with its line.
"""

from collections import Counter
from collections.abc import Collection, Sequence, Set
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run.files import to_jsonable
from lm_jax.run.results import Count, InvalidError, parse_result
from lm_jax.text.lines import read_json_lines, refused
from lm_jax.text.tokenizer import Tokenizer
from sparse_jax.circuits import metrics
from sparse_jax.circuits.encoding import EncodedExample, UnfitError, encode
from sparse_jax.circuits.generators import GENERATORS, Example, mib

# Draws for each example asked for, after which the rest is given up.
_DRAWS = 20


@dataclasses.dataclass(frozen=True)
class TaskArrays:
    """Aligned prompts, padded on the right, and ids of their continuations padded with -1.

    Attributes:
      clean_BT, corrupt_BT: token ids, 0 where `valid_BT` is false.
      valid_BT: positions with a token.
      position_B: position at which the first token of the continuation is predicted.
      continuations: right and wrong ids there and, after a tens digit, at the position after it.

    Raises:
      BadInputError: a row is not padded on the right, or has its metric elsewhere than at its last
        token or the one before; naming the row.
    """

    clean_BT: np.ndarray
    corrupt_BT: np.ndarray
    valid_BT: np.ndarray
    position_B: np.ndarray
    continuations: metrics.Continuations

    def __post_init__(self) -> None:
        T = self.valid_BT.shape[1]
        for row, (valid_T, length) in enumerate(zip(self.valid_BT, self.lengths_B, strict=True)):
            if (valid_T != (np.arange(T) < length)).any():
                raise BadInputError(
                    f"row {row} of valid_BT is not padded on the right; move its "
                    "tokens to the first positions"
                )
            path = self.continuations.path
            most = 1 if path is None else max(1, path.next_BK.shape[1] - 1)
            if not 0 <= length - 1 - self.position_B[row] <= most:
                raise BadInputError(
                    f"position_B[{row}] = {self.position_B[row]} is not the last of the {length} "
                    f"tokens of its row or the one before; give {length - 1}"
                )

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each prompt."""
        return self.valid_BT.sum(1)


@dataclasses.dataclass(frozen=True)
class TaskManifest:
    """What a task was made of.

    Attributes:
      name: name of the generator, or of the user's file.
      metric: name in `metrics.METRICS`.
      seed: seed of the generator; None for a file.
      drawn: examples tried.
      kept: examples in the arrays.
      dropped: number of the others, by reason.
      sha256: digest of the examples kept.
      tokenizer_sha256: digest of the tokenizer.
    """

    name: str
    metric: str
    seed: int | None
    drawn: Count
    kept: Count
    dropped: dict[str, Count]
    sha256: str
    tokenizer_sha256: str


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples of one task under one tokenizer."""

    examples: tuple[Example, ...]
    arrays: TaskArrays
    manifest: TaskManifest

    @property
    def prompt_B(self) -> np.ndarray:
        """Number of each example's clean prompt, from 0; a user's file may repeat one."""
        number: dict[str, int] = {}
        return np.array([number.setdefault(each.clean, len(number)) for each in self.examples])


def make_task(
    name: str,
    tokenizer: Tokenizer,
    *,
    count: int,
    seed: int,
    metric: str | None = None,
    exclude: Collection[Example] = (),
    trained_on: Set[str] = frozenset(),
    max_length: int | None = None,
) -> Task:
    """Draws examples of a task until `count` unseen ones fit the tokenizer.

    Args:
      name: one of `generators.GENERATORS`.
      tokenizer: tokenizer of the model.
      count: examples to keep.
      seed: random seed of the examples.
      metric: one of `metrics.METRICS`; None takes the task's own.
      exclude: examples of other splits, which are not drawn again.
      trained_on: prompts with a continuation, of a training text; examples that stand there with a
        right one are dropped.
      max_length: positions of the model; longer examples are dropped.

    Raises:
      UsageError: no such task or metric.
      BadInputError: fewer than `count` examples fit; the message counts the reasons.
    """
    if name not in GENERATORS:
        raise UsageError(f"there is no task {name!r}{nearest(name, GENERATORS)}")
    generator = GENERATORS[name]
    metric = metrics.check_name(metric or generator.metric)
    rng = np.random.default_rng(seed)
    visited = {example.clean for example in exclude}
    examples: list[Example] = []
    rows: list[EncodedExample] = []
    dropped: Counter[str] = Counter()
    drawn = 0
    while len(rows) < count and drawn < _DRAWS * count:
        example, drawn = generator.draw(rng), drawn + 1
        try:
            if example.clean in visited:
                raise UnfitError("drawn before", "leave it out")
            if any(example.clean + answer in trained_on for answer in example.answers):
                raise UnfitError("in the training text", "leave it out")
            row = encode(example, tokenizer, generator.answer, max_length)
        except UnfitError as reason:
            dropped[str(reason)] += 1
            continue
        visited.add(example.clean)
        examples.append(example)
        rows.append(row)
    if len(rows) < count:
        reasons = "; ".join(f"{number} x {reason}" for reason, number in dropped.most_common())
        raise BadInputError(
            f"task {name!r}: {len(rows)} of {count} examples fit ({reasons}); "
            "ask for fewer, or choose another task or tokenizer"
        )
    return _task(name, metric, seed, drawn, dropped, examples, rows, tokenizer)


def load_task(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    metric: str | None = None,
    max_length: int | None = None,
) -> Task:
    """Reads a task from JSON lines: {"clean", "corrupt", "answers", "wrong_answers"}.

    Rows of MIB's data sets of multiple choice are read, too (`generators.mib`).
    Continuations are written with their leading space, and may have several tokens. "template" may
    name the wording. A clean prompt may come again with another corruption: `Task.prompt_B` says
    which examples share one.

    Args:
      path: the file.
      tokenizer: tokenizer of the model.
      metric: one of `metrics.METRICS`; None takes the logit difference, or where continuations have
        several tokens the difference of log-probabilities.
      max_length: positions of the model, for prompts with their continuations.

    Raises:
      UsageError: no such metric, or the logit difference of continuations of several tokens.
      BadInputError: the file cannot be read, or a line does not hold an example that fits the
        tokenizer, or two lines have the same two prompts; with the lines and the reasons.
    """
    path = Path(path)
    if metric is not None:
        metrics.check_name(metric)
    examples: list[Example] = []
    rows: list[EncodedExample] = []
    line_of: dict[tuple[str, str], int] = {}
    reasons: dict[int, str] = {}
    for number, where, tree in read_json_lines(path):
        example = _parse(tree, where)
        pair = example.clean, example.corrupt
        if pair in line_of:
            raise BadInputError(
                f"{where}: both prompts are those of line {line_of[pair]}; leave one line out, or "
                "give it another corrupt prompt"
            )
        line_of[pair] = number
        try:
            rows.append(encode(example, tokenizer, "tokens", max_length))
        except UnfitError as reason:
            reasons[number] = f"{reason}; {reason.remedy}"
        examples.append(example)
    if reasons:
        raise refused(path, reasons)
    if not rows:
        raise BadInputError(f"{path}: no examples; write one JSON object per line")
    several = any(row.path for row in rows)
    if several and metric == "logit_difference":
        raise UsageError(
            f"{path}: continuations have several tokens, which have no logit difference; choose "
            "log_probability_difference"
        )
    metric = metric or ("log_probability_difference" if several else "logit_difference")
    return _task(path.stem, metric, None, len(rows), Counter(), examples, rows, tokenizer)


def check_disjoint(*tasks: Task) -> None:
    """Checks that no clean prompt is in two splits.

    Raises:
      BadInputError: naming the prompt.
    """
    visited: set[str] = set()
    for task in tasks:
        prompts = {example.clean for example in task.examples}
        if shared := sorted(visited & prompts):
            raise BadInputError(
                f"{len(shared)} prompts are in two splits, such as {shared[0]!r}; pass the "
                "examples of one as `exclude` when the other is made"
            )
        visited |= prompts


def _parse(tree: Any, where: str) -> Example:
    if mib.is_row(tree):
        return mib.example(tree, where)
    try:
        example = parse_result(tree, Example)
    except InvalidError as error:
        raise BadInputError(f"{where}: {error}") from error
    if not example.clean or not example.corrupt:
        raise BadInputError(f"{where}: a prompt is empty; write its text")
    return example


def _task(
    name: str,
    metric: str,
    seed: int | None,
    drawn: int,
    dropped: Counter[str],
    examples: Sequence[Example],
    rows: Sequence[EncodedExample],
    tokenizer: Tokenizer,
) -> Task:
    position_B = [len(row.clean) - 1 - row.appended for row in rows]
    digest = hashlib.sha256(json.dumps(to_jsonable(list(examples))).encode()).hexdigest()
    arrays = TaskArrays(
        clean_BT=_padded([row.clean for row in rows], 0),
        corrupt_BT=_padded([row.corrupt for row in rows], 0),
        valid_BT=_padded([[1] * len(row.clean) for row in rows], 0).astype(bool),
        position_B=np.array(position_B, np.int32),
        continuations=metrics.Continuations(
            right_BA=jnp.asarray(_padded([row.answers for row in rows], -1)),
            wrong_BA=jnp.asarray(_padded([row.wrong for row in rows], -1)),
            tens_B=jnp.asarray([row.clean[-1] for row in rows]),
            second_right_BA=jnp.asarray(_padded([row.second_answers for row in rows], -1)),
            second_wrong_BA=jnp.asarray(_padded([row.second_wrong for row in rows], -1)),
            path=_path(rows),
        ),
    )
    manifest = TaskManifest(
        name=name,
        metric=metric,
        seed=seed,
        drawn=drawn,
        kept=len(rows),
        dropped=dict(dropped),
        sha256=digest,
        tokenizer_sha256=tokenizer.sha256,
    )
    return Task(tuple(examples), arrays, manifest)


def _path(rows: Sequence[EncodedExample]) -> metrics.Path | None:
    """The continuations of several tokens, if there are any; those of one end at the first."""
    if not any(row.path for row in rows):
        return None
    K = max(len(row.path) for row in rows)

    def ended(sides: list[list[list[int]]]) -> jnp.ndarray:
        at = [_padded([side[k] if k < len(side) else [] for side in sides], -1) for k in range(K)]
        A = max(ids_BA.shape[1] for ids_BA in at)
        return jnp.stack(
            [jnp.pad(x, ((0, 0), (0, A - x.shape[1])), constant_values=-1) for x in at], 1
        )

    return metrics.Path(
        next_BK=jnp.asarray(_padded([row.path or [-1] for row in rows], -1)),
        right_BKA=ended([row.path_answers or [row.answers] for row in rows]),
        wrong_BKA=ended([row.path_wrong or [row.wrong] for row in rows]),
    )


def _padded(rows: Sequence[Sequence[int]], fill: int) -> np.ndarray:
    """Rows as one int32 array, filled on the right."""
    result = np.full((len(rows), max(map(len, rows))), fill, np.int32)
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return result
