"""Trains both models of each seed, and measures them.

Besides what every study has, the work folder holds

    seed_<n>/dense/, seed_<n>/sparse/    checkpoints, metrics.parquet, evaluations.parquet
                                         (`lm_jax.train.loop`)
    seed_<n>/sums.parquet                a row per held-out sum and model: answer and open edges
    seed_<n>/graphs.json                 attention of both models on the sums that are drawn
    seed_<n>/summary.json                every number of that seed (`results.SeedSummary`)

The page shows the first seed in detail, and a comparison of all.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.model.decoder import count_params
from lm_jax.parallel import sharding
from lm_jax.run.config import to_plain
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result, parse_result
from lm_jax.run.tables import write_table
from lm_jax.study import Work, frame
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.metrics import METRICS
from sparse_jax.studies.addition import measures, models, numbers, problems
from sparse_jax.studies.addition.attention_trace import AttentionTrace
from sparse_jax.studies.addition.models import Task
from sparse_jax.studies.addition.results import (
    DENSE,
    GRAPHS,
    SPARSE,
    AdditionSummary,
    DrawnSum,
    ModelResult,
    ModelResults,
    SeedSummary,
    SumCounts,
    seed_folder,
)
from sparse_jax.studies.addition.settings import AdditionConfig
from sparse_jax.studies.posttrain.run_identity import claim_folder

SUMS = "sums.parquet"


def measure_all(config: AdditionConfig, work: Work) -> AdditionSummary:
    """Runs or resumes the study of every seed.

    Args:
      config: the settings.
      work: the open work folder; with `force`, folders of seeds with other settings are renamed,
        and the seeds trained again.
    """
    drawn_P = tuple(problems.number(text) for text in config.drawn)
    splits = {seed: problems.split(config.held_out, seed, drawn_P) for seed in config.seeds}
    work.record(
        data={
            f"{part}, seed {seed}": problems.digest(numbers_P)
            for seed, split in splits.items()
            for part, numbers_P in zip(("trained", "held out"), split, strict=True)
        }
    )
    seeds = [run_seed(config, work, seed, splits[seed], drawn_P) for seed in config.seeds]
    return numbers.summarise(config, seeds)


def run_seed(
    config: AdditionConfig,
    work: Work,
    seed: int,
    split: tuple[np.ndarray, np.ndarray],
    drawn_P: tuple[int, ...],
) -> SeedSummary:
    """Trains both models of one seed, or resumes them, and measures them."""
    (train_P, held_out_P), folder = split, seed_folder(work.path, seed)
    settings = to_plain(config)
    # Other sums to draw may change which are held out; the digests below cover that.
    for name in ("seeds", "drawn", *MAY_CHANGE):
        settings.pop(name, None)
    data = {"data": problems.digest(train_P), "held out": problems.digest(held_out_P)}
    identity = {"seed": seed} | data | settings
    claim_folder(folder, trained=identity, shown={}, result=frame.SUMMARY, force=work.force)
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
    drawn = [_drawn(trace, name, held_out_P, p) for name, trace in traces.items() for p in drawn_P]
    write_json(folder / GRAPHS, drawn)
    write_json(folder / frame.SUMMARY, summary)
    return load_result(folder / frame.SUMMARY, SeedSummary)


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


def _drawn(trace: AttentionTrace, name: str, numbers_P: np.ndarray, number: int) -> DrawnSum:
    at = int(np.flatnonzero(numbers_P == number)[0])
    return parse_result(
        {
            "model": name,
            "problem": number,
            "open": trace.open_LPTS[:, at].tolist(),
            # A division on a GPU may round to a little above 1.
            "weights": np.minimum(trace.pattern_LPTS[:, at], 1.0).tolist(),
            "answer": trace.answer_PA[at].tolist(),
        },
        DrawnSum,
    )
