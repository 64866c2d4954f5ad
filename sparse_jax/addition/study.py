"""The study from its settings to its numbers: trains both models of each seed and measures them.

The work folder then holds

    seed_<n>/dense/, seed_<n>/sparse/    checkpoints, metrics.parquet, evaluations.parquet
                                         (`lm_jax.train.loop`)
    seed_<n>/sums.parquet                a row for each held-out sum and model: its answer and its
                                         open edges
    seed_<n>/summary.json                every number of that seed
    summary.json                         those of all seeds
    report.html                          the first seed in detail and all beside each other, one
                                         offline file
"""

import dataclasses
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
from lm_jax.run.files import read_json, replace_file, write_json, write_text
from lm_jax.run.provenance import PROVENANCE_FILE, collect_provenance, record_provenance
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.metrics import EVALUATIONS, METRICS
from sparse_jax.addition import measures, models, problems, report
from sparse_jax.addition.attention_trace import AttentionTrace
from sparse_jax.addition.config import AdditionConfig
from sparse_jax.addition.graph import Drawn
from sparse_jax.addition.models import DENSE, SPARSE, Task
from sparse_jax.claims import claim

SUMS, SUMMARY, REPORT = "sums.parquet", "summary.json", "report.html"


@dataclasses.dataclass(frozen=True)
class Studied:
    """One seed: its numbers, its curves by model, and by model the sums whose graphs are drawn."""

    summary: dict[str, Any]
    evaluations: dict[str, dict[str, list[float]]]
    drawn: dict[str, list[Drawn]]


def run(config: AdditionConfig, folder: Path, *, force: bool = False) -> dict[str, Any]:
    """Runs or resumes the study of every seed in an open work folder and returns the summary.

    With `force`, seeds that were trained under other settings are set aside and trained again.
    """
    drawn = tuple(problems.number(text) for text in config.drawn)
    splits = {seed: problems.split(config.held_out, seed, drawn) for seed in config.seeds}
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
    studied = [run_seed(config, folder, seed, splits[seed], drawn, force) for seed in config.seeds]
    results = [each.summary for each in studied]
    summary = {
        "config": to_plain(config),
        "seeds": results,
        "between_seeds": report.between_seeds(results),
        "device": jax.devices()[0].device_kind,
    }
    write_json(folder / SUMMARY, summary)
    summary = read_json(folder / SUMMARY)
    page = report.build(
        summary,
        studied[0].evaluations,
        studied[0].drawn,
        provenance=read_json(folder / PROVENANCE_FILE),
    )
    write_text(folder / REPORT, page)
    return summary


def run_seed(
    config: AdditionConfig,
    folder: Path,
    seed: int,
    split: tuple[np.ndarray, np.ndarray],
    drawn: tuple[int, ...],
    force: bool,
) -> Studied:
    """Trains both models of one seed, or resumes them, and measures them."""
    (trained, held_out), folder = split, folder / f"seed_{seed}"
    kept = to_plain(config)
    # Another choice of sums to draw may hold out others, which the digest tells.
    for name in ("seeds", "drawn", *MAY_CHANGE):
        kept.pop(name, None)
    bound = {"seed": seed, "data": problems.digest(trained), "held out": problems.digest(held_out)}
    claim(folder, trained=bound | kept, shown={}, result=SUMMARY, force=force)
    mesh = sharding.make_mesh(data=-1)
    result, seen, begin = {}, {}, None
    for task in models.tasks(config):
        own = models.train_model(
            task, config, folder / task.name, trained, held_out, mesh, seed=seed, begin=begin
        )
        weights = task.weights(sharding.fetch(own.state.params))
        # The dense model comes first.
        begin = weights if config.begin == DENSE else None
        seen[task.name] = task.look(weights, problems.rows(held_out))
        result[task.name] = measured(task, seen[task.name], weights, held_out, seed)
        result[task.name] |= _training(folder / task.name)
    summary = {
        "seed": seed,
        "config": to_plain(config),
        "parameters": count_params(models.decoder(config)),
        "sums": {
            "trained": len(trained),
            "held_out": len(held_out),
            "held_out_by_carries": np.bincount(problems.carries(held_out), minlength=3).tolist(),
        },
        "models": result,
    }
    table = pa.concat_tables(_rows(name, own, held_out) for name, own in seen.items())
    with replace_file(folder / SUMS) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    write_json(folder / SUMMARY, summary)
    return Studied(
        read_json(folder / SUMMARY),
        {name: evaluations(folder / name) for name in seen},
        {name: [_one(own, held_out, number) for number in drawn] for name, own in seen.items()},
    )


def measured(
    task: Task, seen: AttentionTrace, weights: Any, numbers_P: np.ndarray, seed: int
) -> dict[str, Any]:
    """What a pass over the held-out sums says of one model."""
    layers = range(len(seen.edges_LP))
    results = {
        "accuracy": measures.accuracy(seen, numbers_P),
        "edges": measures.edges(seen, seed),
        "operands": measures.operands(seen, 0),
        "without": measures.without_a_layer(task.look, weights, numbers_P, seen),
    }
    if task.name == SPARSE:
        # In the dense model every edge is open, and so is each of these.
        results["carry"] = [
            one for layer in layers for one in measures.carry(seen, numbers_P, layer)
        ]
    return results


def evaluations(folder: Path) -> dict[str, list[float]]:
    """The numbers of a model's evaluations by name, and `step`, in the order of the steps."""
    table = pq.read_table(folder / EVALUATIONS)
    results: dict[str, list[float]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["step"]):
        results.setdefault(row["name"], []).append(row["value"])
    return {"step": pc.unique(table["step"]).sort().to_pylist()} | results


def _training(folder: Path) -> dict[str, Any]:
    steps = pq.read_table(folder / METRICS)
    return {"steps": len(steps), "training_seconds": float(pc.sum(steps["seconds"]).as_py())}


def _rows(name: str, seen: AttentionTrace, numbers_P: np.ndarray) -> pa.Table:
    columns = {
        "model": [name] * len(numbers_P),
        "sum": [problems.written(number).rstrip("=") for number in numbers_P.tolist()],
        "carries": problems.carries(numbers_P),
        "answer": [problems.decode(answer_A) for answer_A in seen.answer_PA],
        "exact": seen.exact_P,
    }
    by_layer = {f"edges_{i}": edges_P for i, edges_P in enumerate(seen.edges_LP)}
    return pa.table(columns | by_layer)


def _one(seen: AttentionTrace, numbers_P: np.ndarray, number: int) -> Drawn:
    at = int(np.flatnonzero(numbers_P == number)[0])
    return Drawn(number, seen.open_LPTS[:, at], seen.pattern_LPTS[:, at], seen.answer_PA[at])
