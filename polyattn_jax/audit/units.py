"""Units of work of an audit, shared out among processes, and the stores that keep their rows.

A unit is one batch of prompts under one condition. A unit that is on disk is not done again.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from pathlib import Path

import jax
import numpy as np

from lm_jax.run import processes
from lm_jax.run.rows import RowStore, Unit
from lm_jax.run.units import measure_units
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.schema import (
    ANSWERS,
    DIVERGENCES,
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
    divergences: RowStore
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
        "divergences": DIVERGENCES,
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
    """Runs `work` on every batch that the store does not hold yet (`measure_units`)."""
    plan: dict[Unit, tuple[str, Batch]] = {
        (stage, name, number): (name, batch)
        for name, suite in suites.items()
        for number, batch in enumerate(batches(suite, audited.config.batch_size))
    }
    measure_units(store, stage, plan, lambda item: work(*item), noun="batches")
