"""Synthetic documents of few words, prepared like real ones."""

import json
import random

import numpy as np
import pytest

from lm_jax.text import preparation
from lm_jax.text.records import records_file
from lm_jax.text.tokenizer_training import train_tokenizer

WORDS = ["on", "the", "way", "home", "she", "saw", "three", "boats", "and", "keeper"]

ALL_TRAIN = (1.0, 0.0, 0.0)


def texts(count, seed=0):
    """Documents of 1 to 60 words, each unlike the others."""
    draw = random.Random(seed)
    for i in range(count):
        yield f"doc-{i}", f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((text for _, text in texts(200)), vocab_size=120)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prepared"
    preparation.prepare(texts(53), tokenizer, path, splits=ALL_TRAIN, seed=0)
    return path


@pytest.fixture
def prepared(folder):
    return preparation.open_prepared(folder)


def stored(prepared, split="train"):
    """The ids of every document of a split, read without the tested code."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(prepared.folder / records_file(split)))
    count = reader.num_records()
    return [np.frombuffer(r, "<u2").tolist() for r in (reader.read_all() if count else [])]


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def write_corpus(folder, count=120):
    folder.mkdir()
    lines = [json.dumps({"text": text}) for _, text in texts(count)]
    (folder / "a.jsonl").write_text("\n".join([*lines, "not json", '{"other": 1}', ""]))
    (folder / "b.txt").write_text("one boat")
    (folder / "c.txt").write_bytes(b"\xff")
    (folder / "notes.md").write_text("no corpus")
    return folder
