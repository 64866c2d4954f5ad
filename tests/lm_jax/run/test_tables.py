"""Parquet files with their provenance."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import StorageError
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.tables import read_table_provenance, write_table

TABLE = pa.table({"x": [1, 2]}).replace_schema_metadata({"unit": "m"})


def test_a_table_holds_what_provenance_json_holds_and_its_own_metadata(tmp_path):
    record_provenance(tmp_path, collect_provenance(seeds={"run": 3}, dtype="float32"))
    write_table(tmp_path / "x.parquet", TABLE, read_provenance(tmp_path))
    provenance = read_table_provenance(tmp_path / "x.parquet")
    assert provenance == json.loads((tmp_path / "provenance.json").read_text())
    assert (provenance["seeds"], provenance["dtype"]) == ({"run": 3}, "float32")
    assert {"git", "packages", "device", "start"} <= provenance.keys()
    written = pq.read_table(tmp_path / "x.parquet")
    assert written.schema.metadata[b"unit"] == b"m"
    assert written.equals(TABLE)


def test_a_table_without_one_has_none(tmp_path):
    pq.write_table(TABLE, tmp_path / "x.parquet")
    assert read_table_provenance(tmp_path / "x.parquet") is None


def test_a_folder_that_is_gone_is_named(tmp_path):
    record_provenance(tmp_path, collect_provenance())
    with pytest.raises(StorageError, match=r"gone/x\.parquet"):
        write_table(tmp_path / "gone" / "x.parquet", TABLE, read_provenance(tmp_path))
