"""A summary of two models on all nine tasks and an embedded one, with drawn predictions."""

import numpy as np
import pyarrow as pa

from protot_jax.studies.glue import numbers
from protot_jax.studies.glue.readers import Split, TaskData
from protot_jax.studies.glue.results import ROWS, GlueSummary, GridPoint, ModelSummary, Submission
from protot_jax.studies.glue.submission import write_submission
from protot_jax.studies.glue.tasks import EMBEDDED, OFFICIAL

SEEDS = (234, 124, 325)
COUNT = 60
TASKS = {**OFFICIAL, "films": EMBEDDED["films"]}


def data_of(name):
    """A task with the named splits and drawn targets."""
    task, rng = TASKS[name], np.random.default_rng(len(name))

    def split(labelled=True):
        targets = rng.integers(0, task.outputs, COUNT) if task.labels else rng.uniform(0, 5, COUNT)
        texts = [(f"text {i}",) for i in range(COUNT)]
        return Split(texts, targets.astype(float) if labelled else None, sha256="ab" * 32)

    evaluated = {each: split() for each in task.dev} or {"SST-2 validation": split()}
    submitted = {each: split(labelled=False) for each in task.test}
    main = next(iter(evaluated.values()))
    official = name in OFFICIAL
    counts = {} if official else {"left out for overlap with reported sentences": 821}
    return TaskData(split(), main, evaluated, submitted, "Drawn.", official, counts)


def rows_of(model, name, data, right):
    """Predictions of every seed, of which a share is right."""
    task, parts = TASKS[name], []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        for split, own in data.predicted.items():
            targets = own.targets
            if targets is None:
                targets = np.zeros(COUNT)
            if task.labels:
                other = (targets + 1) % task.outputs
                predictions = np.where(rng.random(COUNT) < right, targets, other)
            else:
                predictions = (right * targets + rng.normal(size=COUNT)).clip(0, 5)
            columns = {
                "model": [model] * COUNT,
                "task": [name] * COUNT,
                "split": [split] * COUNT,
                "seed": [seed] * COUNT,
                "learning_rate": [1e-4] * COUNT,
                "warmup": [0.06] * COUNT,
                "example": np.arange(COUNT),
                "target": [None] * COUNT if own.targets is None else own.targets,
                "prediction": predictions,
                "outputs": [[0.0]] * COUNT,
            }
            parts.append(pa.table({f.name: pa.array(columns[f.name], f.type) for f in ROWS}))
    return pa.concat_tables(parts)


def build(folder):
    """The summary, with submission files in `folder`."""
    data = {name: data_of(name) for name in TASKS}
    models, results, submissions = [], [], []
    for model, kind, right in (("ours", "protot", 0.9), ("other <i>", "llama", 0.5)):
        grid = tuple(
            GridPoint(rate, warmup, {"sst2": right - rate, "mnli": right}, right - rate / 2)
            for rate in (1e-4, 1e-3)
            for warmup in (0.06, 0.1)
        )
        models.append(ModelSummary(model, kind, 1_234_567, 256, 300, "ab" * 32, 1e-4, 0.06, grid))
        files = {}
        for name, own in data.items():
            rows = rows_of(model, name, own, right)
            results.append(
                numbers.summarise_result(
                    rows,
                    model,
                    name,
                    TASKS[name],
                    own,
                    steps=[30] * 3,
                    best_steps=[20] * 3,
                    resamples=100,
                )
            )
            for file in own.submitted:
                table = numbers.predicted(rows, model, name, file)[SEEDS[0]]
                files[file] = (TASKS[name], table["prediction"].to_numpy())
        if folder is not None:
            written, missing = write_submission(folder / kind, files)
            submissions.append(Submission(model, written, missing))
    averages = [numbers.average(model.name, results) for model in models]
    return GlueSummary(
        models=tuple(models),
        tasks=tuple(numbers.summarise_task(name, TASKS[name], data[name]) for name in data),
        results=tuple(results),
        averages=tuple(filter(None, averages)),
        submissions=tuple(submissions),
        search_tasks=("sst2", "mnli"),
        seeds=SEEDS,
        pooling="mean",
        batch_size=16,
        epochs=3,
        device="cpu",
    )
