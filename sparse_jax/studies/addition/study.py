"""Runs the study: trains both models of each seed, measures them, and writes the report.

The work folder then holds

    seed_<n>/dense/, seed_<n>/sparse/    checkpoints, metrics.parquet, evaluations.parquet
                                         (`lm_jax.train.loop`)
    seed_<n>/sums.parquet                a row per held-out sum and model: answer and open edges
    seed_<n>/summary.json                every number of that seed (`results.SeedSummary`)
    summary.json                         those of all seeds (`results.AdditionSummary`)
    report.html                          the first seed in detail and a comparison of all, one
                                         offline file
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.model.decoder import count_params
from lm_jax.parallel import sharding
from lm_jax.run.config import to_plain
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.metrics import EVALUATIONS, METRICS
from sparse_jax.studies.addition import measures, models, problems, report
from sparse_jax.studies.addition.attention_trace import AttentionTrace
from sparse_jax.studies.addition.config import AdditionConfig
from sparse_jax.studies.addition.graph import SumGraph
from sparse_jax.studies.addition.models import Task
from sparse_jax.studies.addition.results import (
    DENSE,
    SPARSE,
    AdditionSummary,
    ModelResult,
    ModelResults,
    SeedSummary,
    SumCounts,
    between_seeds,
)
from sparse_jax.studies.posttrain.run_identity import claim_folder

SUMS, SUMMARY, REPORT = "sums.parquet", "summary.json", "report.html"


@dataclasses.dataclass(frozen=True)
class SeedStudy:
    """Numbers of one seed, and by model the curves of training and the graphs of sums."""

    summary: SeedSummary
    evaluations: dict[str, dict[str, list[float]]]
    graphs: dict[str, list[SumGraph]]


def run(config: AdditionConfig, folder: Path, *, force: bool = False) -> AdditionSummary:
    """Runs or resumes the study of every seed in an open work folder and returns the summary.

    With `force`, the folders of seeds with other settings are renamed and the seeds trained again.
    """
    drawn_P = tuple(problems.number(text) for text in config.drawn)
    splits = {seed: problems.split(config.held_out, seed, drawn_P) for seed in config.seeds}
    origin = collect_provenance(
        seeds={f"study {i}": seed for i, seed in enumerate(config.seeds)},
        dtype="float32",
        data={
            f"{part}, seed {seed}": problems.digest(numbers_P)
            for seed, split in splits.items()
            for part, numbers_P in zip(("trained", "held out"), split, strict=True)
        },
    )
    record_provenance(folder, origin)
    studies = [
        run_seed(config, folder, seed, splits[seed], drawn_P, force) for seed in config.seeds
    ]
    seeds = tuple(each.summary for each in studies)
    summary = AdditionSummary(
        config=config,
        seeds=seeds,
        between_seeds=between_seeds(seeds),
        device=jax.devices()[0].device_kind,
    )
    write_json(folder / SUMMARY, summary)
    page = report.build(
        summary,
        studies[0].evaluations,
        studies[0].graphs,
        provenance=to_jsonable(read_provenance(folder)),
    )
    write_text(folder / REPORT, page)
    return summary


def run_seed(
    config: AdditionConfig,
    folder: Path,
    seed: int,
    split: tuple[np.ndarray, np.ndarray],
    drawn_P: tuple[int, ...],
    force: bool,
) -> SeedStudy:
    """Trains both models of one seed, or resumes them, and measures them."""
    (train_P, held_out_P), folder = split, folder / f"seed_{seed}"
    settings = to_plain(config)
    # Other sums to draw may change which are held out; the digests below cover that.
    for name in ("seeds", "drawn", *MAY_CHANGE):
        settings.pop(name, None)
    data = {"data": problems.digest(train_P), "held out": problems.digest(held_out_P)}
    identity = {"seed": seed} | data | settings
    claim_folder(folder, trained=identity, shown={}, result=SUMMARY, force=force)
    mesh = sharding.make_mesh(data=-1)
    results: dict[str, ModelResult] = {}
    traces: dict[str, AttentionTrace] = {}
    begin = None
    # The dense model comes first.
    for task in models.tasks(config):
        own = folder / task.name
        run = models.train_model(
            task, config, own, train_P, held_out_P, mesh, seed=seed, begin=begin
        )
        weights = task.weights(sharding.fetch(run.state.params))
        begin = weights if config.begin == DENSE else None
        traces[task.name] = task.trace(weights, problems.rows(held_out_P))
        results[task.name] = measure(task, traces[task.name], weights, held_out_P, own, seed)
    none, one, two = np.bincount(problems.carries(held_out_P), minlength=3).tolist()
    summary = SeedSummary(
        seed=seed,
        config=config,
        parameters=count_params(models.decoder(config)),
        sums=SumCounts(len(train_P), len(held_out_P), (none, one, two)),
        models=ModelResults(dense=results[DENSE], sparse=results[SPARSE]),
    )
    table = pa.concat_tables(_rows(name, trace, held_out_P) for name, trace in traces.items())
    write_table(folder / SUMS, table)
    write_json(folder / SUMMARY, summary)
    return SeedStudy(
        load_result(folder / SUMMARY, SeedSummary),
        {name: evaluations(folder / name) for name in traces},
        {
            name: [_graph(trace, held_out_P, number) for number in drawn_P]
            for name, trace in traces.items()
        },
    )


def measure(
    task: Task,
    trace: AttentionTrace,
    weights: Any,
    numbers_P: np.ndarray,
    folder: Path,
    seed: int,
) -> ModelResult:
    """Measurements of one model on the held-out sums; `folder` is that of its training."""
    layers = len(trace.edges_LP)
    carry = [measures.carry(trace, numbers_P, layer) for layer in range(layers)]
    steps = pq.read_table(folder / METRICS)
    return ModelResult(
        accuracy=measures.accuracy(trace, numbers_P),
        edges=measures.edges(trace, seed),
        operands=measures.operands(trace, 0),
        without=measures.ablate_layers(task.trace, weights, numbers_P, layers),
        # In the dense model every edge is open, and so is each of these.
        carry=tuple(itertools.chain.from_iterable(carry)) if task.name == SPARSE else (),
        steps=len(steps),
        training_seconds=float(pc.sum(steps["seconds"]).as_py()),
    )


def evaluations(folder: Path) -> dict[str, list[float]]:
    """Metrics of a model's evaluations by name, and `step`, in the order of steps."""
    table = pq.read_table(folder / EVALUATIONS)
    results: dict[str, list[float]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["step"]):
        results.setdefault(row["name"], []).append(row["value"])
    return {"step": pc.unique(table["step"]).sort().to_pylist()} | results


def _rows(name: str, trace: AttentionTrace, numbers_P: np.ndarray) -> pa.Table:
    columns = {
        "model": [name] * len(numbers_P),
        "sum": [problems.format_problem(number).rstrip("=") for number in numbers_P.tolist()],
        "carries": problems.carries(numbers_P),
        "answer": [problems.decode(answer_A) for answer_A in trace.answer_PA],
        "exact": trace.exact_P,
    }
    by_layer = {f"edges_{i}": edges_P for i, edges_P in enumerate(trace.edges_LP)}
    return pa.table(columns | by_layer)


def _graph(trace: AttentionTrace, numbers_P: np.ndarray, number: int) -> SumGraph:
    at = int(np.flatnonzero(numbers_P == number)[0])
    return SumGraph(number, trace.open_LPTS[:, at], trace.pattern_LPTS[:, at], trace.answer_PA[at])
