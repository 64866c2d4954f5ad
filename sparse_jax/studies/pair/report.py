"""The page of the pair: pretraining to the plateau, then edges against the loss of the control.

Every number comes from the files of the run; nothing is measured here.
"""

import math
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Column, Points, Report, Section, Series, section, table, table_of
from lm_jax.report.markup import Markup, number
from lm_jax.report.prose import Prose
from lm_jax.train.metrics import EVALUATIONS
from sparse_jax.studies.pair import dense
from sparse_jax.studies.pair.folders import DENSE
from sparse_jax.studies.pair.report_text import format_summary
from sparse_jax.studies.pair.results import PairSummary, ScoredModel, TaskScore
from sparse_jax.studies.pair.settings import PairConfig
from sparse_jax.studies.posttrain.report import read
from sparse_jax.studies.posttrain.report_text import ONE_RUN, format_signed, interval_cell
from sparse_jax.studies.posttrain.results import BoundSummary, Spread

_PROSE = Prose("sparse_jax.studies.pair")
# What the project aims at: the share of open edges, and nats per token over the control.
GOAL_EDGES, GOAL_LOSS = 0.005, 0.03
VARIANT_NAMES = {
    "sparse": "without a teacher",
    "teacher": "with the dense model as teacher",
    "renormalise": "open edges renormalised",
    "scaled_gate": "gate logits with the scale of the scores",
    "learn_bias": "gate biases learned",
}


def build(config: PairConfig, summary: PairSummary, folder: Path) -> Report:
    """The report of a pair; its curves are read from the work folder."""
    return Report(
        "A dense model, its sparse version and its control",
        lambda: [
            pretraining(config, summary, folder / DENSE),
            results(summary),
            frontier(summary, folder),
            tasks(summary),
        ],
        lead=[conclusion(summary)],
        lines=[answer(summary), format_summary(summary)],
    )


def _first_bound(summary: PairSummary) -> tuple[BoundSummary, Spread]:
    """The first variant at its first bound, and its loss over the control's."""
    bound = summary.variants[0].bounds[0]
    if bound.over_control is None:
        raise ValueError("the pair has no control")
    return bound, bound.over_control


def answer(summary: PairSummary) -> str:
    """How many edges the first variant keeps at its first bound, and at what loss."""
    bound, over = _first_bound(summary)
    seeds = f"means of {over.n} seeds" if over.n > 1 else ONE_RUN
    return (
        f"The sparse model keeps {bound.edges.mean:.2%} of attention edges open, at a loss of "
        f"{number(over.mean, '+.4f')} nats per token against the control ({seeds})."
    )


def conclusion(summary: PairSummary) -> Markup:
    """The first variant at its first bound, as the mean over seeds."""
    bound, over = _first_bound(summary)
    return report.verdict(
        answer(summary),
        f"The control is trained on the same text for as many updates, with all edges. The goal is "
        f"{GOAL_EDGES:.1%} at {GOAL_LOSS:+.2f}.",
        tone="good" if over.mean <= GOAL_LOSS and bound.edges.mean <= GOAL_EDGES else "warn",
    )


def pretraining(config: PairConfig, summary: PairSummary, folder: Path) -> Section:
    """The held-out loss of the dense model by update, over both phases."""
    curves, before = [], 0
    for name, label in ((dense.PLATEAU, "constant rate"), (dense.COOLDOWN, "falling rate")):
        rows = [
            row
            for row in pq.read_table(folder / name / EVALUATIONS).to_pylist()
            if row["name"] == "validation/perplexity"
        ]
        steps = [before + row["step"] for row in rows]
        curves.append(Series(label, steps, [math.log(row["value"]) for row in rows]))
        before += summary.dense.plateau.steps
    settings, trained = config.dense, summary.dense
    plateau = settings.plateau
    ended = (
        _PROSE("plateau", plateau.min_gain, plateau.patience, settings.eval_every)
        if trained.reached_plateau
        else _PROSE("no_plateau", number(trained.plateau.steps))
    )
    return section(
        "Pretraining",
        _PROSE(
            "dense",
            number(trained.parameters),
            f" in {settings.num_layers} layers of {settings.num_heads} heads",
            ", ".join(config.text.tasks),
            f"{config.text.task_share:.0%}",
            number(trained.cooldown.steps),
        ),
        ended,
        report.curves(
            curves,
            caption="Held-out loss of the dense model.",
            x_label="update",
            y_label="nats per token",
        ),
    )


def results(summary: PairSummary) -> Section:
    """A row per run of post-training."""
    rows = [(variant.variant, run) for variant in summary.variants for run in variant.runs]
    several = len(summary.controls) > 1
    less = "; ".join(
        f"{format_signed(control.difference)}" + f" for seed {control.seed}" * several
        for control in summary.controls
    )
    first = summary.variants[0].runs[0]
    return section(
        "Post-training",
        _PROSE("control", less, first.steps),
        table_of(
            rows,
            [
                Column("Sparse model", value=lambda row: VARIANT_NAMES[row[0]]),
                Column("Seed", value=lambda row: row[1].seed),
                Column("Loss", value=lambda row: interval_cell(row[1].loss, ".4f")),
                Column(
                    "Minus control", value=lambda row: interval_cell(row[1].over_control, "+.4f")
                ),
                Column("Minus dense", value=lambda row: interval_cell(row[1].difference, "+.4f")),
                Column("Open, %", value=lambda row: interval_cell(row[1].edges, ".3f", 100)),
                Column("Per head", ".1f", lambda row: row[1].open_edges_per_head),
            ],
            caption="Each run: losses in nats per token, with 95 % intervals over documents; open "
            "edges in total, and per head and window.",
            n=f"{number(first.windows)} windows of {first.edges.n} documents",
        ),
    )


def frontier(summary: PairSummary, folder: Path) -> Section:
    """Open edges against the loss over the control's, at every evaluation of every run."""
    controls = {control.seed: control.loss.estimate for control in summary.controls}
    groups = []
    for variant in summary.variants:
        edges, over, titles = [], [], []
        for run in variant.runs:
            own = read(folder / variant.variant / run.folder)
            steps, losses = own.evaluated("validation/loss")
            edges += [100 * share for share in own.evaluated("validation/edges")[1]]
            over += [loss - controls[run.seed] for loss in losses]
            titles += [f"seed {run.seed}, bound {run.target:.3f}, step {step}" for step in steps]
        groups.append(Points(VARIANT_NAMES[variant.variant], edges, over, titles))
    return section(
        "Edges against loss",
        _PROSE("frontier"),
        report.scatter(
            groups,
            caption="Loss minus that of the control at its end, against open edges.",
            x_label="open edges, %",
            y_label="loss - control's loss, nats per token",
            log_x=True,
            n=f"{sum(len(group.titles or ()) for group in groups)} evaluations",
        ),
    )


def tasks(summary: PairSummary) -> Section:
    """Accuracy of every model on every task, a row per model and a column per task."""
    names = list(dict.fromkeys(score.task for score in summary.scores))
    by_model: dict[ScoredModel, dict[str, TaskScore]] = {}
    for score in summary.scores:
        by_model.setdefault(score.model, {})[score.task] = score
    rows = [
        [_model_name(model), "" if model.seed is None else model.seed]
        + [interval_cell(scores[name].accuracy, ".0f", 100) for name in names]
        for model, scores in by_model.items()
    ]
    left_out = [_PROSE("left_out", each.task, each.reason) for each in summary.unscored]
    if not names:
        return section("Tasks", *left_out)
    counts = sorted({score.accuracy.n for score in summary.scores})
    return section(
        "Tasks",
        _PROSE("tasks"),
        table(
            ["Model", "Seed", *names],
            rows,
            caption="Prompts answered right, %, with 95 % intervals over prompts.",
            n=f"{counts[0]} to {counts[-1]} prompts a task"
            if counts[1:]
            else f"{counts[0]} prompts",
        ),
        *left_out,
    )


def _model_name(model: ScoredModel) -> str:
    if model.bound is None:
        return model.role
    return f"sparse, {VARIANT_NAMES[model.role]}, bound {model.bound + 1}"
