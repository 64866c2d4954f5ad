"""Parquet files with their provenance."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import StorageError
from lm_jax.run.provenance import (
    Provenance,
    collect_provenance,
    read_provenance,
    record_provenance,
)
from lm_jax.run.rows import RowStore
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


def test_the_parts_of_a_run_have_its_provenance_unless_one_is_given(tmp_path):
    record_provenance(tmp_path, collect_provenance(seeds={"run": 3}))
    part = tmp_path / "seed_3" / "dense"
    part.mkdir(parents=True)
    write_table(part / "x.parquet", TABLE)
    assert read_table_provenance(part / "x.parquet")["seeds"] == {"run": 3}
    write_table(part / "x.parquet", TABLE, Provenance(**vars(collect_provenance(seeds={"y": 4}))))
    assert read_table_provenance(part / "x.parquet")["seeds"] == {"y": 4}
    record_provenance(part, collect_provenance(seeds={"z": 5}))
    write_table(part / "x.parquet", TABLE)
    assert read_table_provenance(part / "x.parquet")["seeds"] == {"z": 5}


def test_a_merged_store_has_the_provenance_beside_its_fingerprint(tmp_path):
    record_provenance(tmp_path, collect_provenance())
    with RowStore(tmp_path / "rows", pa.schema([("x", pa.int64())]), "abc") as store:
        store.append(("a", 0), {"x": [1, 2]})
        store.merge(tmp_path / "rows.parquet")
    assert pq.read_schema(tmp_path / "rows.parquet").metadata[b"fingerprint"] == b"abc"
    recorded = json.loads((tmp_path / "provenance.json").read_text())
    assert read_table_provenance(tmp_path / "rows.parquet") == recorded


def test_a_table_outside_of_a_run_has_none(tmp_path):
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    record_provenance(tmp_path, collect_provenance())
    write_table(deep / "x.parquet", TABLE)
    assert read_table_provenance(deep / "x.parquet") is None


def test_a_table_without_one_has_none(tmp_path):
    pq.write_table(TABLE, tmp_path / "x.parquet")
    assert read_table_provenance(tmp_path / "x.parquet") is None


def test_a_folder_that_is_gone_is_named(tmp_path):
    record_provenance(tmp_path, collect_provenance())
    with pytest.raises(StorageError, match=r"gone/x\.parquet"):
        write_table(tmp_path / "gone" / "x.parquet", TABLE, read_provenance(tmp_path))
