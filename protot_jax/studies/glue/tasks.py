"""The nine GLUE tasks and three built from embedded text: labels, metrics, official file layouts.

Wang et al., 2018, "GLUE: A multi-task benchmark and analysis platform for natural language
understanding". File and column names are those of the official archive; a submission is one file
for each test set. The first metric of a task is its main one, as in the tables of the Prototype
Transformer's paper.
"""

from collections.abc import Mapping
import dataclasses
from typing import Literal

from lm_jax.errors import UsageError, nearest

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
_NLI = ("entailment", "not_entailment")
_THREE_WAY = ("entailment", "neutral", "contradiction")
_BINARY = ("0", "1")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One official TSV file: its path in the user's folder, and where texts and labels are.

    Attributes:
      path: path in the folder that the user names.
      texts: the columns of the one or two texts.
      label: the column of the label; "" in a file without labels.
      header: names of the columns of a file that has no header line; () if it has one.
      skips_broken: leave out, and count, lines with another number of columns than the header. QQP
        has such lines; in any other file they are refused.
    """

    path: str
    texts: tuple[str, ...]
    label: str = ""
    header: tuple[str, ...] = ()
    skips_broken: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """A task on sentences or pairs of sentences.

    Attributes:
      title: name of the task in reports.
      labels: the classes as files spell them, in the order of their indices; () for a score.
      metrics: what is reported, the main one first.
      train, dev: the official files; `dev` by the name of the split, the first one selects.
      test: the official files without labels, by the name of their file in a submission.
      bounds: the lowest and highest score; predictions are clipped to it.
    """

    title: str
    labels: tuple[str, ...]
    metrics: tuple[Metric, ...]
    train: Layout | None = None
    dev: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    test: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs of the head: the classes, or one for a score."""
        return len(self.labels) or 1

    @property
    def main(self) -> Metric:
        """The metric that selects and that tables show."""
        return self.metrics[0]


def _official(
    title: str,
    folder: str,
    texts: tuple[str, ...],
    label: str,
    labels: tuple[str, ...],
    metrics: tuple[Metric, ...],
    *,
    bounds: tuple[float, float] | None = None,
    skips_broken: bool = False,
) -> Task:
    """A task whose three files have one header each, and the same names of columns."""

    def layout(split: str, label: str = "") -> Layout:
        return Layout(
            f"{folder}/{split}.tsv", texts, label, skips_broken=skips_broken and label != ""
        )

    return Task(
        title,
        labels,
        metrics,
        layout("train", label),
        {"dev": layout("dev", label)},
        {f"{folder}.tsv": layout("test")},
        bounds,
    )


_PAIR = ("sentence1", "sentence2")
_COLA = ("source", "label", "mark", "sentence")

OFFICIAL: Mapping[str, Task] = {
    "cola": Task(
        "CoLA",
        _BINARY,
        ("matthews",),
        Layout("CoLA/train.tsv", ("sentence",), "label", _COLA),
        {"dev": Layout("CoLA/dev.tsv", ("sentence",), "label", _COLA)},
        # The test file alone has a header.
        {"CoLA.tsv": Layout("CoLA/test.tsv", ("sentence",))},
    ),
    "sst2": _official("SST-2", "SST-2", ("sentence",), "label", _BINARY, ("accuracy",)),
    "mrpc": _official(
        "MRPC", "MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("f1", "accuracy")
    ),
    "stsb": _official(
        "STS-B", "STS-B", _PAIR, "score", (), ("pearson", "spearman"), bounds=(0.0, 5.0)
    ),
    "rte": _official("RTE", "RTE", _PAIR, "label", _NLI, ("accuracy",)),
    "wnli": _official("WNLI", "WNLI", _PAIR, "label", _BINARY, ("accuracy",)),
    "qqp": _official(
        "QQP",
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        _BINARY,
        ("f1", "accuracy"),
        skips_broken=True,
    ),
    "qnli": _official("QNLI", "QNLI", ("question", "sentence"), "label", _NLI, ("accuracy",)),
    "mnli": Task(
        "MNLI",
        _THREE_WAY,
        ("accuracy",),
        Layout("MNLI/train.tsv", _PAIR, "gold_label"),
        {
            "dev_matched": Layout("MNLI/dev_matched.tsv", _PAIR, "gold_label"),
            "dev_mismatched": Layout("MNLI/dev_mismatched.tsv", _PAIR, "gold_label"),
        },
        {
            "MNLI-m.tsv": Layout("MNLI/test_matched.tsv", _PAIR),
            "MNLI-mm.tsv": Layout("MNLI/test_mismatched.tsv", _PAIR),
            # Scored by the server with the model of MNLI; it has no training text of its own.
            "AX.tsv": Layout("diagnostic/diagnostic.tsv", _PAIR),
        },
    ),
}

# Not GLUE, and not named like it: what they are made of is in `embedded`.
EMBEDDED: Mapping[str, Task] = {
    "films": Task("film sentences, sentiment", _BINARY, ("accuracy",)),
    "films_rating": Task(
        "film sentences, mean rating", (), ("pearson", "spearman"), bounds=(-4.0, 4.0)
    ),
    "qnli_like": Task("SQuAD sentences, answer in it or not", _NLI, ("accuracy",)),
}

TASKS: Mapping[str, Task] = {**OFFICIAL, **EMBEDDED}

SUBMISSION = tuple(name for task in OFFICIAL.values() for name in task.test)


def find(name: str) -> Task:
    """The task of a name.

    Raises:
      UsageError: there is none.
    """
    if name not in TASKS:
        raise UsageError(f"config.tasks: there is no task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]
