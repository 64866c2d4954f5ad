"""Units of work of a run, shared out among its processes."""

from collections.abc import Callable, Mapping
import logging
import time
from typing import Any, TypeVar

import jax
import pyarrow as pa

from lm_jax.run import processes, progress, stop
from lm_jax.run.rows import RowStore, Unit

Item = TypeVar("Item")
Rows = pa.Table | Mapping[str, Any]
_log = logging.getLogger(__name__)


def measure_units(
    store: RowStore,
    name: str,
    plan: Mapping[Unit, Item],
    measure: Callable[[Item], Rows],
    *,
    noun: str = "units",
) -> None:
    """Measures every unit that the store does not hold yet, shared out among processes.

    When it returns, the rows of all are on disk, and the seconds that they took in the log.

    Args:
      store: the rows; opened by all processes before any of them writes more.
      name: what is measured, for progress, log and errors.
      plan: what `measure` is given, by the unit's id, in the order of the work.
      measure: the rows of one unit; none where there is nothing to say of it.
      noun: what a unit is called, in the plural.

    Raises:
      StoppedError: the command was asked to stop.
    """
    begin = time.monotonic()
    todo = [unit for unit in plan if unit not in store]
    count, index = jax.process_count(), jax.process_index()
    with progress.track(
        name,
        len(plan),
        unit=noun,
        done=len(plan) - len(todo),
        quiet=not processes.is_first(),
    ) as advance:
        # In rounds of one unit for each process, so that all of them stop after the same one.
        for start in range(0, len(todo), count):
            if processes.share_stop():
                stop.check(f"during {name}")
            taken = todo[start : start + count]
            if index < len(taken):
                store.append(taken[index], measure(plan[taken[index]]))
            advance(len(taken))
    store.flush()
    processes.wait_for_all()
    if todo:
        _log.info("%s: %d %s in %.1f s", name, len(todo), noun, time.monotonic() - begin)
