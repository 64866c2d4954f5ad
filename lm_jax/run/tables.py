"""Parquet files of results: whole or not there, with their provenance in their own metadata.

    write_table(folder / "rows.parquet", table, read_provenance(folder))
    read_table_provenance(folder / "rows.parquet")["git"]["commit"]

The provenance is that of `provenance.json`, as JSON under `PROVENANCE` in the metadata of the
schema, so that a file that is passed on says which commit, versions, device, settings and data it
comes from.
"""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.run.files import replace_file, to_jsonable
from lm_jax.run.provenance import Provenance

PROVENANCE = b"provenance"


def with_provenance(table: pa.Table, provenance: Provenance) -> pa.Table:
    """The table with the provenance in the metadata of its schema, beside what is there."""
    known = table.schema.metadata or {}
    return table.replace_schema_metadata({**known, PROVENANCE: json.dumps(to_jsonable(provenance))})


def write_table(path: Path, table: pa.Table, provenance: Provenance) -> None:
    """Writes one parquet file with its provenance, whole or not at all.

    Raises:
      StorageError: the file cannot be written.
    """
    with replace_file(path) as file:
        pq.write_table(
            with_provenance(table, provenance), file, compression="zstd", write_page_checksum=True
        )


def read_table_provenance(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The provenance in the metadata of a parquet file; None where there is none."""
    metadata = pq.read_schema(path).metadata or {}
    return json.loads(metadata[PROVENANCE]) if PROVENANCE in metadata else None
