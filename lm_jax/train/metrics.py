"""Training metrics: buffered on the device, written to parquet, the log and trackers.

The metrics of a step stay on the device, and nothing waits for them until the writer settles. Then
every step is written as a row, and so is every number of an evaluation:

    steps/, evaluations/          the rows so far, as shards (`rows.RowStore`)
    metrics.parquet               one row per step (`STEP_SCHEMA`)
    evaluations.parquet           one row per number: step, name, value, n

The same numbers go to TensorBoard and other trackers (`trackers`).
"""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import logging
from pathlib import Path
import time
from typing import Any, Self

import jax
import pyarrow as pa

from lm_jax.checkpoint import manager
from lm_jax.errors import DivergedError
from lm_jax.run import processes, rows
from lm_jax.run.files import write_json
from lm_jax.train.evaluate import Evaluation
from lm_jax.train.throughput import RATES, Throughput, format_rates
from lm_jax.train.trackers import Tracker

DIVERGED = "diverged.json"
STEPS = "steps"
METRICS = "metrics.parquet"
EVALUATIONS = "evaluations.parquet"
STEP_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "loss": pa.float64(),
        "tokens": pa.int64(),
        "grad_norm": pa.float64(),
        "learning_rate": pa.float64(),
        "skipped": pa.bool_(),
        "seconds": pa.float64(),
    }
    | dict.fromkeys(RATES, pa.float64())
)
# Columns in which two runs of the same numbers differ.
TIMING = ("seconds", *RATES)
EVALUATION_SCHEMA = pa.schema(
    {"step": pa.int64(), "name": pa.string(), "value": pa.float64(), "n": pa.int64()}
)
_LISTED_DOCUMENTS = 8
_TRACKED = ("loss", "grad_norm", "learning_rate", *RATES)
_log = logging.getLogger(__name__)


def count_steps(folder: Path, fingerprint: str, columns: tuple[str, ...]) -> int:
    """The number of steps, from the first, whose rows a run has on disk.

    Args:
      folder, fingerprint, columns: the arguments that `MetricWriter` takes.

    Raises:
      CorruptError: a file of rows is damaged.
      UsageError: the rows are of other settings or data.
    """
    with _open_steps(folder, fingerprint, columns) as steps:
        return steps.count_rows()


def _open_steps(folder: Path, fingerprint: str, columns: tuple[str, ...]) -> rows.RowStore:
    schema = pa.schema([*STEP_SCHEMA, *(pa.field(name, pa.float64()) for name in columns)])
    return rows.RowStore(folder / STEPS, schema, fingerprint=fingerprint)


class MetricWriter:
    """Writes metrics to files; buffers those of steps on the device, so that no step waits."""

    def __init__(
        self,
        folder: Path,
        saved: Path,
        *,
        fingerprint: str,
        trackers: Iterable[Tracker],
        advance: Callable[..., None],
        throughput: Throughput,
        columns: tuple[str, ...] = (),
        writes: bool = True,
        in_nats: bool = True,
    ) -> None:
        """Opens the files of a run.

        Args:
          folder: folder of the run.
          saved: folder of its checkpoints, to name the last good one in errors.
          fingerprint: hash of its settings and data; rows of others are refused.
          trackers: the trackers that get the numbers besides the files; closed with them.
          advance: a function that advances the progress bar by a number of steps.
          throughput: the meter that converts the time of an update into rates.
          columns: metrics of a step besides those of `STEP_SCHEMA`, each a number.
          writes: False in a process that only checks whether the numbers are finite.
          in_nats: whether losses of evaluations have a perplexity.
        """
        self._folder, self._saved, self._advance = folder, saved, advance
        self._throughput = throughput
        self._pending: list[tuple[int, Mapping[str, Any], Any]] = []
        self._since = time.monotonic()
        self._writes, self._columns, self._in_nats = writes, columns, in_nats
        if not writes:
            self._open = contextlib.ExitStack()
            return
        with contextlib.ExitStack() as opening:
            enter = opening.enter_context
            self._trackers = [enter(contextlib.closing(each)) for each in trackers]
            self._steps = enter(_open_steps(folder, fingerprint, columns))
            self._evaluations = enter(
                rows.RowStore(folder / "evaluations", EVALUATION_SCHEMA, fingerprint=fingerprint)
            )
            self._open = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def add(self, step: int, metrics: Mapping[str, Any], document_B: Any) -> None:
        """Adds the metrics of one step, and the ids of the documents in its batch."""
        self._pending.append((step, metrics, document_B))

    def restart_clock(self) -> None:
        """Excludes the time since the last read from the rates: it was spent on other work."""
        self._since = time.monotonic()

    def evaluated(self, step: int, result: Evaluation, extra: Mapping[str, float]) -> None:
        """Writes the numbers of an evaluation, and further ones by name."""
        if not self._writes:
            return
        values = {"validation/loss": result.loss}
        if self._in_nats:
            values = {
                "validation/perplexity": result.perplexity,
                "validation/batch_mean_perplexity": result.batch_mean_perplexity,
            }
        (name, value), *_ = values.items()
        values |= dict(extra)
        _log.info("step %d: %s %.3f", step, name.replace("/", " "), value)
        self._track(step, values)
        if ("evaluation", step) in self._evaluations:
            return
        columns = {
            "step": [step] * len(values),
            "name": list(values),
            "value": [float(value) for value in values.values()],
            "n": [result.tokens] * len(values),
        }
        self._evaluations.append(("evaluation", step), columns)

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.add(step, values)

    def flush(self) -> None:
        """Writes every row so far to disk."""
        if not self._writes:
            return
        self._steps.flush()
        self._evaluations.flush()
        for tracker in self._trackers:
            tracker.flush()

    def merge(self) -> None:
        """Writes the two tables, of all steps."""
        self._steps.merge(self._folder / METRICS)
        self._evaluations.merge(self._folder / EVALUATIONS)

    def settle(self) -> None:
        """Waits for the pending steps and writes a row for each.

        Raises:
          DivergedError: at the first of them that is not finite.
        """
        if not self._pending:
            return
        results = [
            (step, jax.device_get(metrics), document_B)
            for step, metrics, document_B in self._pending
        ]
        self._pending.clear()
        now = time.monotonic()
        seconds, self._since = (now - self._since) / len(results), now
        tokens = 0
        for step, metrics, document_B in results:
            if not metrics["finite"]:
                raise self._diverged(step, metrics, document_B)
            tokens += int(metrics["tokens"])
            if self._writes:
                row = {
                    "step": step,
                    "loss": float(metrics["loss"]),
                    "tokens": int(metrics["tokens"]),
                    "grad_norm": float(metrics["grad_norm"]),
                    "learning_rate": float(metrics["learning_rate"]),
                    "skipped": bool(metrics["skipped"]),
                    "seconds": seconds,
                }
                row |= self._throughput.rates(row["tokens"], seconds)
                row |= {name: float(metrics[name]) for name in self._columns}
                names = (*_TRACKED, *self._columns)
                self._track(step, {f"train/{name}": row[name] for name in names})
                # After a kill, rows may exist for steps that no checkpoint holds.
                if ("step", step) not in self._steps:
                    columns = {name: [value] for name, value in row.items()}
                    self._steps.append(("step", step), columns)
        step, metrics, _ = results[-1]
        pace = self._throughput.rates(tokens, seconds * len(results), len(results))
        loss, text = f"loss {metrics['loss']:.4f}", format_rates(pace)
        self._advance(len(results), f"{loss}, {text}")
        _log.info("step %d: %s, gradient norm %.3g, %s", step, loss, metrics["grad_norm"], text)

    def _diverged(self, step: int, metrics: Mapping[str, Any], document_B: Any) -> DivergedError:
        # Every process has the same numbers, and its own rows.
        documents = list(dict.fromkeys(processes.gather(document_B).tolist()))
        steps = manager.saved_steps(self._saved)
        good = str(manager.step_folder(self._saved, steps[-1])) if steps else "none"
        numbers = {"loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}
        if self._writes:
            where = {"step": step, "batch": step - 1, "documents": documents, "last_good": good}
            write_json(self._folder / DIVERGED, where | numbers)
        listed = ", ".join(map(str, documents[:_LISTED_DOCUMENTS]))
        more = f" and {len(documents) - _LISTED_DOCUMENTS} more"
        return DivergedError(
            f"step {step} has loss {numbers['loss']:.4g} and gradient norm "
            f"{numbers['grad_norm']:.4g} on documents {listed}"
            f"{more if len(documents) > _LISTED_DOCUMENTS else ''} ({self._folder / DIVERGED}); "
            f"the last good checkpoint is {good}; lower the learning rate, set clip_norm, or look "
            "at those documents"
        )
