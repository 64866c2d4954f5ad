"""Multiple choice by a dense model, its controls and sparse versions, on the same questions.

    iaj sparse choices --config=sparse/multiple_choice --workdir=runs/multiple_choice
    iaj sparse choices --workdir=runs/multiple_choice \\
        --config.sparse="('$(echo runs/sparse/seed_234/target_*/model)',)" --config.limit=200

The work folder then holds

    scores/         the log-likelihood of every choice, under a hash of model and gates, so that
                    more questions or models of the same folder are not scored again
    summary.json    accuracies, paired changes and digests of the models (`results.ChoiceSummary`)
    report.html     the same as a page

Sparse models answer with gates that are open where the logit is above 0. The same command resumes
a killed run.
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from lm_jax import report
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice import TASKS, Scorer
from lm_jax.evaluate.multiple_choice.results import PairedChange
from lm_jax.model.decoder import forward, last_change
from lm_jax.model.precision import exact_jit
from lm_jax.report import Column, section, table
from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.config_files import in_mode
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result, parse_result
from lm_jax.run.workdir import open_workdir
from lm_jax.weights import hub
from lm_jax.weights.load import Pretrained, identities, load_pretrained
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SparseModel
from sparse_jax.studies.posttrain.results import ChoiceSummary

SCORES, SUMMARY, REPORT = "scores", "summary.json", "report.html"
DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class MultipleChoiceConfig:
    """Everything that decides the result.

    Attributes:
      dense: a local folder, a .gguf file, or a name of the manifest, with which all others are
        compared.
      controls: further dense models, as the control of a post-training, with which the sparse ones
        are compared too: what closing edges costs is the change from it.
      sparse: folders that `sparse_jax.studies.posttrain.posttrain` exported.
      tasks: tasks to answer: arc_easy, piqa, openbookqa (`lm_jax.evaluate.multiple_choice.TASKS`).
      truthfulqa: a file of TruthfulQA, whose MC1 is then a further task.
      limit: the first so many questions of each task; 0 for all.
      batch_tokens: the most tokens in a batch, of which all logits are held at once.
      dtype: dtype of the weights and of the computation.
    """

    dense: str = "smollm2"
    controls: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    tasks: tuple[str, ...] = tuple(TASKS)
    truthfulqa: str = ""
    limit: int = 500
    batch_tokens: int = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        problems = multiple_choice.task_problems("config.tasks", self.tasks)
        if not self.tasks and not self.truthfulqa:
            problems.append("config.tasks names no task, and config.truthfulqa no file; give one")
        others = self.controls + self.sparse
        if len(set(others)) < len(others):
            problems.append(
                f"config.controls = {self.controls} and config.sparse = {self.sparse} name a model "
                "twice; name each once"
            )
        problems += [
            f"config.{name} has {DENSE!r}, as the dense model is called; write ./dense"
            for name in ("controls", "sparse")
            if DENSE in getattr(self, name)
        ]
        if self.limit < 0:
            problems.append(f"config.limit = {self.limit} must be at least 0")
        if self.batch_tokens < 1:
            problems.append(f"config.batch_tokens = {self.batch_tokens} must be at least 1")
        if problems:
            raise UsageError("; ".join(problems))


def experiment(mode: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of a comparison: "smoke" asks two questions of each task."""
    smoke = functools.partial(dataclasses.replace, limit=2)
    return in_mode(mode, MultipleChoiceConfig(**settings), {"smoke": smoke}, of="multiple choice")


def inputs(config: MultipleChoiceConfig) -> Inputs:
    """The models by name and the file of questions, without loading weights.

    Raises:
      BadInputError, CorruptError: a model cannot be read.
    """
    dense = {DENSE: config.dense, **{name: name for name in config.controls}}
    return {
        **identities(dense),
        **identities({name: name for name in config.sparse}, sparse_model.open_identity),
        **file_inputs({"config.truthfulqa": config.truthfulqa}),
    }


def run(config: MultipleChoiceConfig, folder: Path) -> ChoiceSummary:
    """Scores the choices that have no score yet in an open work folder; returns the summary."""
    for path in config.sparse:
        sparse_model.read_note(path)
    questions = multiple_choice.read_tasks(
        config.tasks, truthfulqa_file=config.truthfulqa, limit=config.limit or None
    )
    dtype = jnp.dtype(config.dtype)
    named = {DENSE: config.dense, **{name: name for name in config.controls}}
    dense = {name: load_pretrained(source, dtype=dtype) for name, source in named.items()}
    sparse = {path: sparse_model.load(path, dtype=dtype) for path in config.sparse}
    models: dict[str, Pretrained | SparseModel] = {**dense, **sparse}
    identities = {name: each.identity.text for name, each in models.items()}
    weights = [
        hub.identity(name, identities[name], _base(each).revision) for name, each in models.items()
    ]
    data = dict(collections.ChainMap(*weights))
    origin = collect_provenance(seeds={}, dtype=config.dtype, data=data)
    record_provenance(folder, origin)
    with contextlib.ExitStack() as stack:
        scorers = {
            name: scorer(name, each, config, stack, folder / SCORES)
            for name, each in models.items()
        }
        comparison = multiple_choice.compare(
            scorers, questions, controls=config.controls, quiet=False
        )
    edges = {path: each.numbers.get("open edges", "not recorded") for path, each in sparse.items()}
    device = jax.devices()[0].device_kind
    digests = {name: _base(each).sha256 for name, each in models.items()}
    tree = {"models": digests, "edges": edges, "device": device, **comparison}
    summary = parse_result(tree, ChoiceSummary)
    write_json(folder / SUMMARY, summary)
    page = build(summary, provenance=to_jsonable(read_provenance(folder)))
    write_text(folder / REPORT, page)
    return summary


def scorer(
    name: str,
    model: Pretrained | SparseModel,
    config: MultipleChoiceConfig,
    stack: contextlib.ExitStack,
    scores: Path,
) -> Scorer:
    """Scorer of one model, with its scores on disk while `stack` is open.

    Raises:
      BadInputError: the model has no tokenizer.
    """
    base, settings = _base(model), {"dtype": config.dtype}
    if base.tokenizer is None:
        raise BadInputError(
            f"the model {name} has no tokenizer; put its tokenizer.json beside the weights"
        )
    logits = exact_jit(functools.partial(_logits, model))
    return Scorer(
        logits=functools.partial(logits, base.params),
        tokenizer=base.tokenizer,
        max_length=base.cfg.max_length,
        batch_tokens=config.batch_tokens,
        cache=stack.enter_context(
            multiple_choice.open_cache(scores, model=model.identity.text, settings=settings)
        ),
    )


def _logits(
    model: Pretrained | SparseModel, params: Any, tokens_BT: jax.Array, valid_BT: jax.Array
) -> jax.Array:
    # Weights are an argument, because a compiled program contains what it closes over.
    if not isinstance(model, SparseModel):
        return forward(params, tokens_BT, model.cfg, valid_BT=valid_BT).logits
    # Without rotations by length, the gates need not tell padding apart.
    counted = last_change(model.cfg, tokens_BT.shape[1])
    run = model.with_params(params).forward(tokens_BT, valid_BT=valid_BT if counted else None)
    return run.logits


def _base(model: Pretrained | SparseModel) -> Pretrained:
    return model.base if isinstance(model, SparseModel) else model


def build(summary: ChoiceSummary, *, provenance: Mapping[str, Any]) -> str:
    """The page: accuracies, and changes from the dense model and from controls."""
    shown = _short_names(list(summary.models))
    rows: list[Sequence[object]] = []
    for task, of_task in summary.tasks.items():
        for metric, of_metric in of_task.metrics.items():
            for name, accuracy in of_metric.accuracy.items():
                paired = _change(of_metric.paired.get(name))
                chance = 100 * of_task.chance
                rows.append([task, metric, shown[name], report.rate(accuracy), chance, *paired])
    over_controls = [
        [task, metric, shown[control], shown[name], *_change(paired)]
        for task, of_task in summary.tasks.items()
        for metric, of_metric in of_task.metrics.items()
        for control, of_control in of_metric.over_controls.items()
        for name, paired in of_control.items()
    ]
    counts = ", ".join(f"{task}: {each.n}" for task, each in summary.tasks.items())
    columns = [
        "Task",
        "Metric",
        "Model",
        "Right, %",
        Column("Chance, %", ".1f"),
        "Change, points",
        Column("p", ".2g"),
    ]
    parts = [
        section(
            "Accuracies",
            "By “acc” the answer is the choice of the highest log-likelihood, by “acc_norm” that "
            "of the highest log-likelihood per character. Intervals are at "
            f"{summary.confidence:.0%}. The p value is that of the exact McNemar test of each "
            "comparison alone, not corrected for their number.",
            table(columns, rows, caption="Models on the same questions.", n=counts),
        ),
        *[
            section(
                "Against the control",
                "A control was trained as long with every gate open, so that the change from it is "
                "what closing edges costs.",
                table(
                    ["Task", "Metric", "Control", *columns[2:3], *columns[-2:]],
                    over_controls,
                    caption="Changes from the controls.",
                    n=counts,
                ),
            )
        ]
        * bool(over_controls),
        *[section("Open edges", report.key_values(summary.edges))] * bool(summary.edges),
    ]
    return report.page("Multiple choice", parts, provenance=report.facts(provenance))


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """The last three parts of each path; all of it where two models have the same ones."""
    short = {name: str(Path(*Path(name).parts[-3:])) for name in names}
    return short if len(set(short.values())) == len(names) else {name: name for name in names}


def _change(paired: PairedChange | None) -> tuple[str, object]:
    """Cells of the change and of its p value; empty for the dense model."""
    if paired is None:
        return "", ""
    change = paired.change
    low, middle, high = (100 * each for each in (change.low, change.estimate, change.high))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]", paired.p_value


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = cast(ConfigDict, arguments.config)
    frozen = from_plain(config, MultipleChoiceConfig)
    with open_workdir(arguments.folder, config, resume=arguments.resume) as work:
        given = inputs(frozen)
        done = finish_time(work.path, given)
        if not done:
            run(frozen, work.path)
            mark_finished(work.path, given)
        summary = load_result(work.path / SUMMARY, ChoiceSummary)
        table_text = multiple_choice.table(to_jsonable(summary))
        print(*[f"finished {done}"] * bool(done), table_text, sep="\n")
        print(f"report: {work.path / REPORT}")


if __name__ == "__main__":
    cli.app(main, config="sparse/multiple_choice", config_class=MultipleChoiceConfig)
