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
    label: Callable[[Item], str] | None = None,
    cost: Callable[[Item], int] = lambda _: 1,
) -> None:
    """Measures every unit that the store does not hold yet, shared out among processes.

    When it returns, the rows of all are on disk, and the seconds that they took in the log.

    Args:
      store: the rows; opened by all processes before any of them writes more.
      name: what is measured, for progress, log and errors.
      plan: what `measure` is given, by the unit's id, in the order of the work.
      measure: the rows of one unit; none where there is nothing to say of it.
      noun: what a unit is called, or what its cost counts, in the plural.
      label: name of a unit, which progress shows while it is measured.
      cost: relative time of a unit, by which the time left is told.

    Raises:
      StoppedError: the command was asked to stop.
    """
    begin = time.monotonic()
    todo = [unit for unit in plan if unit not in store]
    count, index = jax.process_count(), jax.process_index()
    total, left = (sum(cost(plan[unit]) for unit in units) for units in (plan, todo))
    with progress.track(
        name,
        total,
        unit=noun,
        done=total - left,
        # Where units have names, each has a line.
        every=0.0 if label else 10.0,
        quiet=not processes.is_first(),
    ) as advance:
        measured = 0
        # In rounds of one unit for each process, so that all of them stop after the same one.
        for start in range(0, len(todo), count):
            taken = todo[start : start + count]
            now = label(plan[taken[0]]) if label else ""
            if processes.share_stop():
                stop.check(f"before {now}" if now else f"during {name}")
            advance(measured, note=f"now {now}" if now else "")
            if index < len(taken):
                store.append(taken[index], measure(plan[taken[index]]))
            measured = sum(cost(plan[unit]) for unit in taken)
        if todo:
            advance(measured)
    store.flush()
    processes.wait_for_all()
    if todo:
        _log.info("%s: %d %s in %.1f s", name, len(todo), noun, time.monotonic() - begin)
