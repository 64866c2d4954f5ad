"""Units of work of an audit, shared out among processes, and the stores that keep their rows.

A unit is one batch of prompts under one condition. A unit that is on disk is not done again.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import logging
from pathlib import Path
import time

import jax
import numpy as np

from lm_jax.run import processes, progress, stop
from lm_jax.run.rows import RowStore
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.schema import (
    ANSWERS,
    FEATURES,
    LOSSES,
    RECIPE_ROWS,
    SUITE_ANSWERS,
    TEXT_LOSSES,
    rows_schema,
)
from polyattn_jax.suites import Suite, batches
from polyattn_jax.suites.batching import Batch


@dataclasses.dataclass(frozen=True)
class ResultStores:
    """The parquet stores of a work folder."""

    rows: RowStore
    answers: RowStore
    losses: RowStore
    features: RowStore
    text_losses: RowStore
    suite_answers: RowStore
    recipe_rows: RowStore


@contextlib.contextmanager
def open_stores(
    folder: Path, fingerprint: str, degrees: Sequence[int | float]
) -> Iterator[ResultStores]:
    """Opens the stores of a work folder; rows have an S_p of each degree."""
    schemas = {
        "rows": rows_schema(degrees),
        "answers": ANSWERS,
        "losses": LOSSES,
        "features": FEATURES,
        "text_losses": TEXT_LOSSES,
        "suite_answers": SUITE_ANSWERS,
        "recipe_rows": RECIPE_ROWS,
    }
    with contextlib.ExitStack() as stack:
        stores = {
            name: stack.enter_context(
                RowStore(folder / name, schema, fingerprint, process=jax.process_index())
            )
            for name, schema in schemas.items()
        }
        # All must see the same units as done before any of them writes more.
        processes.wait_for_all()
        yield ResultStores(**stores)


def run_units(
    audited: AuditedModel,
    store: RowStore,
    stage: str,
    suites: dict[str, Suite],
    work: Callable[[str, Batch], dict[str, np.ndarray]],
) -> None:
    """Runs `work` on every batch that the store does not hold yet, shared out among processes.

    When it returns, all rows of the stage are on disk, and the seconds that it took in the log.
    """
    begin = time.monotonic()
    plan = [
        ((stage, name, number), name, batch)
        for name, suite in suites.items()
        for number, batch in enumerate(batches(suite, audited.config.batch_size))
    ]
    todo = [item for item in plan if item[0] not in store]
    count, index = jax.process_count(), jax.process_index()
    with progress.track(
        stage,
        len(plan),
        unit="batches",
        done=len(plan) - len(todo),
        quiet=not processes.is_first(),
    ) as advance:
        # In rounds of one batch for each process, so that all of them stop after the same one.
        for start in range(0, len(todo), count):
            if processes.share_stop():
                stop.check(f"during {stage}")
            taken = todo[start : start + count]
            if index < len(taken):
                unit, name, batch = taken[index]
                store.append(unit, work(name, batch))
            advance(len(taken))
    store.flush()
    processes.wait_for_all()
    if todo:
        seconds = time.monotonic() - begin
        logging.getLogger(__name__).info("%s: %d batches in %.1f s", stage, len(todo), seconds)
