"""Parquet files of results: whole or not there, with their provenance in their own metadata.

    write_table(folder / "rows.parquet", table)
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
from lm_jax.run.provenance import Provenance, find_provenance

PROVENANCE = b"provenance"


def metadata(provenance: Provenance) -> dict[bytes, bytes]:
    """The provenance as metadata of a parquet schema."""
    return {PROVENANCE: json.dumps(to_jsonable(provenance)).encode()}


def write_table(path: Path, table: pa.Table, provenance: Provenance | None = None) -> None:
    """Writes one parquet file with its provenance, whole or not at all.

    Args:
      path: path of the file.
      table: rows of the file.
      provenance: provenance of the rows; by default that of the run that the file is part of
        (`find_provenance`), if any.

    Raises:
      StorageError: the file cannot be written.
    """
    known = provenance or find_provenance(path.absolute().parent)
    if known is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata(known)})
    with replace_file(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_table_provenance(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The provenance in the metadata of a parquet file; None where there is none."""
    known = pq.read_schema(path).metadata or {}
    return json.loads(known[PROVENANCE]) if PROVENANCE in known else None
