"""Results of many small units of work, kept as parquet shards that survive a kill at any point.

A unit is the smallest piece of work that is done or not done, such as one prompt under one
condition of a sweep.
Its id is a tuple of ints and strings, such as `("sweep", "niah", 17, "relu4")`; it gives zero or
more rows of one fixed schema.

    with RowStore(folder / "shards", schema, fingerprint) as store:
        for unit in plan:
            if unit not in store:
                store.append(unit, columns)
        store.merge(folder / "rows.parquet")

Rows are buffered and written as numbered shards, each whole or absent (`replace_file`). A
kill loses the buffered units and no other; the same command does those again. One growing parquet
file would not do: without its footer, which comes last, it cannot be read.

A shard's name ends in a digest of its bytes, and its schema metadata holds the fingerprint of the
run and the ids of its units. Opening the store checks both, so that a flipped bit, a shard of other
settings or a unit written twice is refused, never averaged. Parquet's own page checksums would miss
damage to that metadata; they are written all the same, for readers of the merged file.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import os
from pathlib import Path
import time
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run.files import storage_error, write_bytes
from lm_jax.run.tables import write_table

Unit = tuple[int | str, ...]

_FINGERPRINT = b"fingerprint"
_UNITS = b"units"
_DIGEST_CHARS = 16


class RowStore:
    """The shards in one folder, to which one process appends.

    The caller holds the lock of the work folder (`open_workdir`). Several processes of one run
    share a folder by `process`: each writes its own shards and reads all that exist at its start,
    so a restart with another split of the work fills only the gaps.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: pa.Schema,
        fingerprint: str,
        *,
        process: int = 0,
        flush_units: int = 256,
        flush_seconds: float = 30.0,
    ) -> None:
        """Opens `folder`, creates it if it is missing, and verifies every shard.

        Args:
          folder: the folder of the shards.
          schema: the columns of a row.
          fingerprint: a hash of all that determines the rows: model, data, settings, code version.
          process: index of this process among those that write here.
          flush_units: a shard is written once this many units are buffered.
          flush_seconds: and once the oldest of them has waited this long when another arrives.

        Raises:
          CorruptError: a shard is damaged, or two hold the same unit.
          UsageError: a shard has another fingerprint or another schema.
          StorageError: the folder cannot be created.
        """
        self._folder = Path(folder)
        self._schema = schema.remove_metadata()
        self._fingerprint = fingerprint
        self._prefix = f"rows-{process:03d}-"
        self._flush_units = flush_units
        self._flush_seconds = flush_seconds
        self._pending: dict[Unit, pa.Table] = {}
        self._oldest = 0.0
        try:
            self._folder.mkdir(exist_ok=True)
            for leftover in self._folder.glob(f".{self._prefix}*.tmp"):
                leftover.unlink()
        except OSError as error:
            raise storage_error(self._folder, error) from error
        self._done: dict[Unit, Path] = {}
        for path in self._shards():
            self._register(path, self._read(path)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._done or unit in self._pending

    def done_keys(self) -> set[Unit]:
        """Returns the units whose rows are on disk."""
        return set(self._done)

    def count_rows(self) -> int:
        """Returns the number of rows on disk."""
        return sum(pq.read_metadata(path).num_rows for path in self._shards())

    def append(self, unit: Unit, rows: pa.Table | Mapping[str, Sequence[Any]]) -> None:
        """Adds the rows of one finished unit: a table, or one sequence per column of the schema.

        Raises:
          BadInputError: the unit exists already, a column is missing, unknown or of another
            type, or a string is not valid Unicode (a lone surrogate).
          StorageError: a shard that was due could not be written; its units stay buffered.
        """
        if not unit or not all(type(part) in (int, str) for part in unit):
            raise BadInputError(f"unit {unit!r} is not a tuple of ints and strings; name it so")
        if unit in self:
            raise BadInputError(f"unit {unit!r} has its rows already; give every unit its own id")
        table = self._table(unit, rows)
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending[unit] = table
        waited = time.monotonic() - self._oldest
        if len(self._pending) >= self._flush_units or waited >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered units as one shard; does nothing if there are none."""
        if not self._pending:
            return
        units = [[unit, table.num_rows] for unit, table in self._pending.items()]
        metadata = {_FINGERPRINT: self._fingerprint, _UNITS: json.dumps(units)}
        sink = pa.BufferOutputStream()
        table = pa.concat_tables(self._pending.values()).replace_schema_metadata(metadata)
        pq.write_table(table, sink, write_page_checksum=True, compression="zstd")
        data = sink.getvalue().to_pybytes()
        numbers = [int(p.name.split("-")[2]) for p in self._folder.glob(f"{self._prefix}*.parquet")]
        name = f"{self._prefix}{max(numbers, default=-1) + 1:06d}-{_digest(data)}.parquet"
        write_bytes(self._folder / name, data)
        self._register(self._folder / name, units)
        self._pending.clear()

    def read(self) -> pa.Table:
        """Returns all rows, in the order of their units' ids and, within a unit, as appended.

        The order, unlike that of the shards, does not depend on where the run was interrupted.

        Raises:
          CorruptError: a shard was damaged or deleted since the store was opened.
        """
        self.flush()
        before, self._done = self._done, {}
        slices: dict[Unit, pa.Table] = {}
        for path in self._shards():
            units, table = self._read(path)
            self._register(path, units)
            start = 0
            for unit, count in units:
                slices[tuple(unit)] = table.slice(start, count)
                start += count
        if lost := before.keys() - self._done.keys():
            path = before[min(lost, key=_order)]
            raise CorruptError(f"{path} is gone; start the same command again to redo its units")
        ordered = [slices[unit] for unit in sorted(slices, key=_order)]
        return pa.concat_tables([self._schema.empty_table(), *ordered]).combine_chunks()

    def read_unit(self, unit: Unit) -> pa.Table:
        """Returns the rows of one unit, as appended.

        Raises:
          CorruptError: its shard was damaged or deleted since the store was opened.
          BadInputError: the unit has no rows yet.
        """
        self.flush()
        if unit not in self._done:
            raise BadInputError(f"unit {unit!r} has no rows yet; append them first")
        path, start = self._done[unit], 0
        if not path.is_file():
            raise CorruptError(f"{path} is gone; start the same command again to redo its units")
        units, table = self._read(path)
        for each, count in units:
            if tuple(each) == unit:
                return table.slice(start, count)
            start += count
        raise CorruptError(f"{path} no longer holds unit {unit!r}; start the same command again")

    def merge(self, path: str | os.PathLike[str]) -> pa.Table:
        """Writes all rows to one parquet file, whole or not at all, and returns them (`read`).

        Its metadata holds the fingerprint, and the provenance of the run (`lm_jax.run.tables`).
        """
        table = self.read()
        write_table(Path(path), table.replace_schema_metadata({_FINGERPRINT: self._fingerprint}))
        return table

    def _table(self, unit: Unit, rows: pa.Table | Mapping[str, Sequence[Any]]) -> pa.Table:
        names = rows.column_names if isinstance(rows, pa.Table) else list(rows)
        if sorted(names) != sorted(self._schema.names):
            odd = sorted(set(names).symmetric_difference(self._schema.names))
            raise BadInputError(
                f"unit {unit!r}: columns {', '.join(odd)} are missing or unknown; give exactly "
                f"{', '.join(self._schema.names)}"
            )
        columns = []
        for field in self._schema:
            values = rows[field.name]
            try:
                if isinstance(values, pa.Array | pa.ChunkedArray):
                    columns.append(values.cast(field.type))
                else:
                    columns.append(pa.array(values, type=field.type))
            except UnicodeEncodeError as error:
                raise BadInputError(
                    f"unit {unit!r}, column {field.name}: {error.object!r} is not valid Unicode; "
                    "remove the lone surrogate from the input"
                ) from error
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise BadInputError(
                    f"unit {unit!r}, column {field.name}: {error}; give values of {field.type}"
                ) from error
        lengths = {
            name: len(column) for name, column in zip(self._schema.names, columns, strict=True)
        }
        if len(set(lengths.values())) > 1:
            raise BadInputError(f"unit {unit!r}: column lengths {lengths} differ; make them equal")
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _shards(self) -> list[Path]:
        return sorted(self._folder.glob("rows-*.parquet"))

    def _register(self, path: Path, units: list[Any]) -> None:
        for unit in (tuple(unit) for unit, _ in units):
            if unit in self._done:
                raise CorruptError(
                    f"{path} and {self._done[unit].name} both hold unit {unit!r}; delete one"
                )
            self._done[unit] = path

    def _read(self, path: Path) -> tuple[list[Any], pa.Table]:
        """Returns the units of a shard, each with its number of rows, and the rows."""
        data = path.read_bytes()
        if path.stem.rpartition("-")[2] != _digest(data):
            raise CorruptError(
                f"{path} is damaged (its bytes do not give the digest in its name); delete that "
                "file, and the same command does its units again"
            )
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        metadata = table.schema.metadata
        fingerprint = metadata[_FINGERPRINT].decode()
        if fingerprint != self._fingerprint:
            raise UsageError(
                f"{path} holds rows of fingerprint {fingerprint}, not {self._fingerprint}: another "
                "model, data set or setting made them; choose another --workdir"
            )
        table = table.replace_schema_metadata(None)
        if not table.schema.equals(self._schema):
            raise UsageError(
                f"{path} has columns {table.schema.names}, not {self._schema.names}, or other "
                "types: another version of the program wrote it; choose another --workdir"
            )
        return json.loads(metadata[_UNITS]), table


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS]


def _order(unit: Unit) -> list[tuple[bool, int | str]]:
    # An int and a string in one place of the ids cannot be compared; ints come first.
    return [(isinstance(part, str), part) for part in unit]
