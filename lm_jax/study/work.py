"""What a study has while it runs: its folder, and stores of rows that a kill leaves whole."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa

from lm_jax.run import processes
from lm_jax.run.files import make_folder
from lm_jax.run.finished import Inputs
from lm_jax.run.provenance import amend_provenance, read_provenance
from lm_jax.run.rows import RowStore, Unit
from lm_jax.run.units import Item, Rows, measure_units

SHARDS = "shards"


@dataclasses.dataclass(frozen=True)
class Opened:
    """What `inputs` of a study loaded, which its `run` need not load again.

    Attributes:
      inputs: identities and digests by name.
      loaded: models, texts, or whatever the study wants as `Work.loaded`.
      load: function that loads and checks it instead, where that takes long: it is called before
        the work folder is made too, but not for a run that has finished.
    """

    inputs: Inputs
    loaded: Any = None
    load: Callable[[], Any] | None = None

    def complete(self) -> "Opened":
        """The same, loaded."""
        return self if self.load is None else Opened(self.inputs, self.load())


@dataclasses.dataclass(frozen=True)
class Work:
    """The open work folder of a study.

    Attributes:
      path: the folder; only process 0 writes files of its own there.
      fingerprint: what rows must be of to be kept: the hash of the settings that may not change,
        and of all inputs. A study whose rows depend on fewer of them replaces it.
      loaded: what `inputs` loaded (`Opened`), else None.
      force: whether a checkpoint of other settings is to be resumed too (`--resume=force`).
    """

    path: Path
    fingerprint: str
    loaded: Any = None
    force: bool = False

    def part(self, name: str) -> "Work":
        """The work of a step that is a study of its own, in a folder within this one.

        Raises:
          StorageError: the folder cannot be created.
        """
        folder = self.path / name
        processes.on_first(lambda: make_folder(folder))
        return dataclasses.replace(self, path=folder, loaded=None)

    def record(
        self,
        *,
        data: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
        seeds: Mapping[str, int] | None = None,
    ) -> None:
        """Adds to the provenance what is known only when models and texts are read.

        Args:
          data: digests and revisions by name, beside the study's inputs.
          tokenizer: sha256 of the tokenizer.
          seeds: random seeds by what they decide, beside `seed` or `seeds` of the settings.
        """

        def amend() -> None:
            record = read_provenance(self.path)
            last = (record.restarts or (record,))[-1]
            amend_provenance(
                self.path,
                data={**last.data, **(data or {})},
                tokenizer=tokenizer or last.tokenizer,
                seeds={**last.seeds, **(seeds or {})},
            )

        processes.on_first(amend)

    def units(
        self,
        name: str,
        schema: pa.Schema,
        plan: Mapping[Unit, Item],
        measure: Callable[[Item], Rows],
        *,
        shards: str = SHARDS,
        label: Callable[[Item], str] | None = None,
        task: str = "",
        noun: str = "units",
    ) -> pa.Table:
        """Measures every unit that has no rows yet, and returns the rows of all.

        Units are shared out among processes (`lm_jax.run.units`), and each is on disk before the
        next begins.

        Args:
          name: the table, written as `<name>.parquet` when all units are done.
          schema: columns of the table.
          plan: what `measure` is given, by the unit's id, in the order of the work.
          measure: the rows of one unit; none where there is nothing to say of it.
          shards: folder that holds the rows until then.
          label: name of a unit, for progress.
          task: what is done, for progress; "" for the name of the table.
          noun: what a unit is called, in the plural.

        Raises:
          StoppedError: the command was asked to stop.
          CorruptError: a shard is damaged.
          UsageError: a shard is of other settings or inputs.
        """
        with self.store(schema, shards=shards) as store:
            measure_units(store, task or name, plan, measure, label=label, noun=noun)
            return self.merge(store, name)

    @contextlib.contextmanager
    def store(self, schema: pa.Schema, *, shards: str = SHARDS) -> Iterator[RowStore]:
        """The rows of the run in one folder, for units that read those of units before them.

        Args:
          schema: columns of the rows.
          shards: folder that holds them.

        Raises:
          CorruptError: a shard is damaged.
          UsageError: a shard is of other settings or inputs.
        """
        folder, index = self.path / shards, jax.process_index()
        with RowStore(folder, schema, self.fingerprint, process=index, flush_units=1) as store:
            # All must see the same units as done before any of them writes more.
            processes.wait_for_all()
            yield store

    def merge(self, store: RowStore, name: str) -> pa.Table:
        """The rows of all processes; process 0 writes them to `<name>.parquet`."""
        tables = []
        processes.on_first(lambda: tables.append(store.merge(self.path / f"{name}.parquet")))
        return tables[0] if tables else store.read()
