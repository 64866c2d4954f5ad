"""The held-out part of prepared data: the first documents of two splits, and nothing else."""

import dataclasses

import numpy as np
import pytest

from lm_jax.errors import BadInputError
from lm_jax.text.exports import export_held_out
from lm_jax.text.preparation import CorpusConfig, prepare_corpus
from lm_jax.text.prepared import open_prepared
from lm_jax.text.splits import SPLITS
from tests.lm_jax.text.synthetic_corpus import stored, write_corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    source = write_corpus(folder / "text")
    corpus = CorpusConfig(str(source), vocab_size=120, splits=(0.5, 0.3, 0.2), seed=3)
    return prepare_corpus(folder / "data", corpus)


@pytest.mark.parametrize("documents", [0, 1, 4, 10**6])
def test_they_are_the_first_documents_of_each_split(prepared, tmp_path, documents):
    manifest = export_held_out(prepared, tmp_path / "part", documents=documents)
    part = open_prepared(tmp_path / "part", tokenizer=prepared.tokenizer)
    assert part.manifest == manifest
    counts = []
    for split in SPLITS:
        wanted = [] if split == "train" else stored(prepared, split)[:documents]
        assert len(stored(prepared, split)) > 4
        assert stored(part, split) == wanted
        lengths = [len(ids) for ids in wanted]
        size = manifest["splits"][split]
        assert (size["documents"], size["tokens"]) == (len(wanted), sum(lengths))
        assert np.load(part.folder / f"{split}-lengths.npy").tolist() == lengths
        counts.append(len(wanted))
    for split, count in zip(SPLITS, counts, strict=True):
        assert manifest["splits"][split]["share"] == (count and count / sum(counts))


def test_every_id_that_ends_a_text_goes_with_it(prepared, tmp_path):
    tokenizer = dataclasses.replace(prepared.tokenizer, other_stop_ids=(7, 5))
    several = dataclasses.replace(prepared, tokenizer=tokenizer)
    export_held_out(several, tmp_path / "part", documents=1)
    part = open_prepared(tmp_path / "part")
    assert part.tokenizer.stop_ids == (prepared.tokenizer.eos_id, 7, 5)


def test_it_names_the_data_that_it_is_a_part_of(prepared, tmp_path):
    manifest = export_held_out(prepared, tmp_path / "part", documents=2)
    whole = prepared.manifest
    assert manifest["notes"] == whole["notes"] | {"of_documents_sha256": whole["documents_sha256"]}
    assert manifest["documents_sha256"] != whole["documents_sha256"]
    assert (manifest["sources"], manifest["seed"]) == (whole["sources"], 3)
    with pytest.raises(BadInputError, match="exists; name a folder that does not"):
        export_held_out(prepared, tmp_path / "part", documents=2)
