"""Rows survive a kill at any point: none lost that was written, none twice, none changed unseen."""

import errno
import itertools
import math
import os
from pathlib import Path
import random
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import BadInputError, CorruptError, StorageError, UsageError
from lm_jax.run.rows import RowStore

ROOT = Path(__file__).parents[3]
SCHEMA = pa.schema(
    [
        ("prompt", pa.int64()),
        ("text", pa.string()),
        ("status", pa.dictionary(pa.int8(), pa.string())),
        ("s_2", pa.float32()),
    ]
)


def _rows(prompt, count=3):
    return {
        "prompt": [prompt] * count,
        "text": [f"row {i} \u202e\0 é" for i in range(count)],
        "status": ["saturated" if i % 2 else "dead" for i in range(count)],
        "s_2": [math.nan if i == 0 else prompt / (i + 1) for i in range(count)],
    }


def _store(folder, **options):
    return RowStore(folder, SCHEMA, options.pop("fingerprint", "f1"), **options)


def _fill(folder, prompts, **options):
    with _store(folder, **options) as store:
        for prompt in prompts:
            store.append(("sweep", prompt), _rows(prompt, prompt % 4))
        return store.read()


def _shards(folder):
    return sorted(folder.glob("rows-*.parquet"))


def test_rows_come_back_in_the_order_of_units_however_they_were_written(tmp_path):
    whole_run = _fill(tmp_path / "a", range(40))
    shuffled = random.Random(0).sample(range(40), 40)
    other = _fill(tmp_path / "b", shuffled, flush_units=3)
    assert len(_shards(tmp_path / "b")) == 14
    assert whole_run["prompt"].to_pylist() == [p for p in range(40) for _ in range(p % 4)]
    assert other.column("prompt").equals(whole_run.column("prompt"))
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for folder, path in zip("ab", paths, strict=True):
        _store(tmp_path / folder).merge(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    merged = pq.read_table(paths[0], page_checksum_verification=True)
    assert merged.schema.equals(SCHEMA)
    assert math.isnan(merged["s_2"][0].as_py()), "NaN is a value, not a hole"
    assert merged["s_2"].null_count == 0


def test_one_unit_is_read_alone(tmp_path):
    _fill(tmp_path, range(10), flush_units=4)
    store = _store(tmp_path)
    assert store.count_rows() == sum(prompt % 4 for prompt in range(10))
    for prompt in range(10):
        table = store.read_unit(("sweep", prompt))
        assert table["prompt"].to_pylist() == [prompt] * (prompt % 4)
    with pytest.raises(BadInputError, match=r"unit \('sweep', 10\) has no rows yet"):
        store.read_unit(("sweep", 10))
    _shards(tmp_path)[0].unlink()
    with pytest.raises(CorruptError, match="is gone; start the same command again"):
        store.read_unit(("sweep", 1))


def test_units_of_ints_and_strings_have_one_order(tmp_path):
    with _store(tmp_path) as store:
        for unit in [("b",), (10,), ("a", 2), (9,), ("a", 1)]:
            store.append(unit, _rows(sum(map(len, map(str, unit))), 1))
        assert store.done_keys() == set()
        store.flush()
        assert store.done_keys() == {("b",), (10,), ("a", 2), (9,), ("a", 1)}
        assert store.read()["prompt"].to_pylist() == [1, 2, 2, 2, 1]


def test_a_unit_without_rows_is_done_all_the_same(tmp_path):
    _fill(tmp_path, [0])
    store = _store(tmp_path)
    assert ("sweep", 0) in store
    assert store.read().num_rows == 0


def test_shards_are_written_by_count_and_by_age(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = _store(tmp_path, flush_units=3, flush_seconds=10)
    for prompt, at, shards in [(1, 0, 0), (2, 9, 0), (3, 9, 1), (4, 50, 1), (5, 59, 1), (6, 60, 2)]:
        now[0] = at
        store.append((prompt,), _rows(prompt))
        assert len(_shards(tmp_path)) == shards, prompt


# One process imports and forks the writers, so that a restart costs milliseconds.
DRIVER = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[2])
from test_rows import SCHEMA, _rows
from lm_jax.run.workdir import open_workdir
from lm_jax.run.rows import RowStore

def write(name):
    with open_workdir(f"{sys.argv[1]}/{name}", {}) as workdir:
        with RowStore(workdir.path / "shards", SCHEMA, "f1", flush_units=5) as store:
            for prompt in range(150):
                if ("sweep", prompt) not in store:
                    print(name, prompt, flush=True)
                    time.sleep(0.001)
                    store.append(("sweep", prompt), _rows(prompt))
            store.merge(workdir.path / "rows.parquet")

def fork(name):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        write(name)
        os._exit(0)
    os.close(writing)
    return child, os.fdopen(reading)

chance = random.Random(3)
for start in range(5):
    child, lines = fork("killed")
    # So many units, and then anywhere in what follows: a loaded machine changes nothing.
    for _ in range(chance.randint(6, 25)):
        print(lines.readline(), end="")
    time.sleep(chance.uniform(0.0, 0.005))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(lines.read() + f"kill {start}", flush=True)
for name in ("killed", "whole"):
    child, lines = fork(name)
    print(lines.read(), end="")
    assert os.waitpid(child, 0)[1] == 0
"""


def test_killed_at_random_and_restarted_gives_the_file_of_an_uninterrupted_run(tmp_path):
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, tmp_path, Path(__file__).parent],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert (driver.returncode, driver.stderr) == (0, "")
    starts = [[]]
    for name, number in (line.split() for line in driver.stdout.splitlines()):
        if name == "kill":
            starts.append([])
        elif name == "killed":
            starts[-1].append(int(number))
    starts = [start for start in starts if start]
    # A start begins where the last left off, but for the one shard of 5 units that was not written.
    for before, after in itertools.pairwise(starts):
        assert before[-1] - 5 <= after[0] <= before[-1] + 1
    assert starts[-1][0] > 0, "every kill came before the first shard was written"
    files = [(tmp_path / name / "rows.parquet").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    rows = pq.read_table(tmp_path / "killed" / "rows.parquet")
    assert rows["prompt"].to_pylist() == [p for p in range(150) for _ in range(3)]


def test_every_flipped_bit_is_found_and_names_the_shard_and_the_remedy(tmp_path):
    _fill(tmp_path, range(1, 60))
    (path,) = _shards(tmp_path)
    data = path.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        place = generator.randrange(8 * len(data))
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptError) as caught:
            _store(tmp_path)
    assert caught.value.exit_code == 7
    assert str(path) in str(caught.value)
    assert "delete that file" in str(caught.value)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError):
        _store(tmp_path)


def test_a_deleted_shard_is_done_again_and_only_that(tmp_path):
    whole = _fill(tmp_path, range(30), flush_units=10)
    _shards(tmp_path)[1].unlink()
    with _store(tmp_path) as store:
        todo = [p for p in range(30) if ("sweep", p) not in store]
        assert todo == list(range(10, 20))
        for prompt in todo:
            store.append(("sweep", prompt), _rows(prompt, prompt % 4))
        assert store.read()["prompt"].equals(whole["prompt"])


def test_a_shard_deleted_under_an_open_store_is_no_silent_hole(tmp_path):
    _fill(tmp_path, range(30), flush_units=10)
    store = _store(tmp_path)
    _shards(tmp_path)[1].unlink()
    with pytest.raises(CorruptError, match="is gone"):
        store.merge(tmp_path / "rows.parquet")
    assert not (tmp_path / "rows.parquet").exists()


def test_a_unit_in_two_shards_is_refused(tmp_path):
    for process in (0, 1):
        _store(tmp_path, process=process)
    stores = [_store(tmp_path, process=process) for process in (0, 1)]
    for store in stores:
        store.append(("x", 1), _rows(1))
        store.flush()
    with pytest.raises(CorruptError, match="both hold unit"):
        _store(tmp_path)
    with pytest.raises(CorruptError, match="both hold unit"):
        stores[0].read()


def test_processes_share_a_folder_and_see_each_others_units_at_the_start(tmp_path):
    for process in (0, 1):
        with _store(tmp_path, process=process) as store:
            for prompt in range(process, 10, 2):
                store.append((prompt,), _rows(prompt))
    assert _store(tmp_path).done_keys() == {(p,) for p in range(10)}
    assert [p.name[:15] for p in _shards(tmp_path)] == ["rows-000-000000", "rows-001-000000"]


def test_rows_of_other_settings_or_another_schema_are_refused(tmp_path):
    _fill(tmp_path, range(3))
    with pytest.raises(UsageError, match="holds rows of fingerprint f1, not f2"):
        _store(tmp_path, fingerprint="f2")
    with pytest.raises(UsageError, match="another version of the program"):
        RowStore(tmp_path, SCHEMA.set(0, pa.field("prompt", pa.int32())), "f1")


@pytest.mark.parametrize(
    ("unit", "change", "words"),
    [
        ((1,), {"text": ["a", "\ud800", "b"]}, "column text: '\\ud800' is not valid Unicode"),
        ((1,), {"prompt": [2**70] * 3}, "column prompt: "),
        ((1,), {"text": ["a"]}, "column lengths"),
        ((1,), {"extra": [1, 2, 3]}, "columns extra are missing or unknown"),
        ((), {}, "is not a tuple of ints and strings"),
        (("done",), {}, "has its rows already"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused_and_the_rest_is_kept(tmp_path, unit, change, words):
    with _store(tmp_path) as store:
        store.append(("done",), _rows(0))
        with pytest.raises(BadInputError) as caught:
            store.append(unit, _rows(1) | change)
        assert words in str(caught.value)
    assert _store(tmp_path).done_keys() == {("done",)}


def test_a_table_passes_as_rows(tmp_path):
    with _store(tmp_path) as store:
        table = pa.table(_rows(1)).select(["s_2", "text", "status", "prompt"])
        store.append((1,), table)
        store.append((2,), _rows(1))
        stored = store.read()
    assert stored.slice(0, 3)["s_2"].to_pylist()[1:] == stored.slice(3)["s_2"].to_pylist()[1:]
    assert stored.drop_columns("s_2").slice(0, 3).equals(stored.drop_columns("s_2").slice(3))


def test_a_full_disk_loses_no_row_that_was_written_and_the_run_goes_on_later(tmp_path, monkeypatch):
    whole = _fill(tmp_path / "whole", range(20))
    folder = tmp_path / "full"
    _fill(folder, range(10))

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left"), _store(folder) as store:
            store.append(("sweep", 10), _rows(10, 2))
    assert len(list(folder.iterdir())) == 1
    rest = [p for p in range(20) if ("sweep", p) not in _store(folder)]
    assert rest == list(range(10, 20))
    assert _fill(folder, rest)["prompt"].equals(whole["prompt"])


def test_a_half_written_shard_is_removed_and_that_of_another_process_is_not(tmp_path):
    for process in (0, 1):
        (tmp_path / f".rows-00{process}-000000-ab.parquet.tmp").write_bytes(b"PAR1")
    _fill(tmp_path, range(3))
    assert [p.name for p in tmp_path.glob(".*.tmp")] == [".rows-001-000000-ab.parquet.tmp"]
