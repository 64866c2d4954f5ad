"""The benchmark files in the repository are those that their page names, read as they are."""

from collections import Counter
from pathlib import Path

import pytest

from lm_jax.run.files import file_digest
from lm_jax.run.results import load_result
from lm_jax.text.preparation import CorpusConfig, split_documents
from lm_jax.text.splits import SPLITS
from protot_jax.studies.perturbations.results import MEANING_FILE, NOISE_FILE, RECORD, Benchmark
from protot_jax.studies.perturbations.settings import PAPER_SLICES
from protot_jax.studies.robustness import meaning, perturb, sentences

FOLDER = Path(__file__).parents[4] / "docs/data/benchmark"
PAIRS = (NOISE_FILE, PAPER_SLICES)
FLIPS = (MEANING_FILE, meaning.SLICES)


def test_the_files_are_those_of_their_record():
    record = load_result(FOLDER / RECORD, Benchmark)
    assert record.perturbations == perturb.VERSION
    text = (FOLDER.parents[1] / "protot" / "benchmark.md").read_text("utf-8")
    for name, _ in (PAIRS, FLIPS):
        digest = file_digest(FOLDER / name)
        assert record.files[name] == digest
        assert digest["sha256"] in text


def test_every_slice_has_500_pairs_and_each_differs():
    for name, slices in (PAIRS, FLIPS):
        given = sentences.read(FOLDER / name)
        assert not given.sentences
        assert Counter(pair.slice for pair in given.pairs) == dict.fromkeys(slices, 500)
        assert all(pair.text != pair.perturbed for pair in given.pairs)
        assert len({(pair.slice, pair.text, pair.perturbed) for pair in given.pairs}) == 500 * len(
            slices
        )


def test_originals_are_held_out_and_flips_have_frames():
    for name, slices in (PAIRS, FLIPS):
        for pair in sentences.read(FOLDER / name).pairs:
            assert (pair.split in ("validation", "test")) == (pair.source != "built")
            assert (pair.frame != "") == (pair.source == "built")
        if slices is meaning.SLICES:
            pairs = sentences.read(FOLDER / name).pairs
            for one in slices:
                counts = Counter(pair.frame for pair in pairs if pair.slice == one)
                assert len(counts) == 12 and set(counts.values()) <= {41, 42}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.real("wiki", "sotu")
def test_no_original_is_a_sentence_of_training_text():
    """Sentence by sentence, and not by the search of words that the benchmark uses."""
    pairs = sentences.read(FOLDER / PAIRS[0]).pairs
    for source, unit in (("wiki", "document"), ("sotu", "paragraph")):
        corpus = CorpusConfig(source=source, unit=unit)
        of_split = {
            split: set(sentences.split_sentences(split_documents(corpus, split)))
            for split in SPLITS
        }
        own = [pair for pair in pairs if pair.source == source]
        assert not {pair.text for pair in own} & of_split["train"]
        assert all(pair.text in of_split[pair.split] for pair in own)


def test_a_change_is_of_its_kind():
    """By rules that do not know the generators."""
    given = sentences.read(FOLDER / PAIRS[0])
    for pair in given.pairs:
        old, new = pair.text, pair.perturbed
        match pair.slice:
            case "punctuation":
                assert [c for c in old if c.isalnum()] == [c for c in new if c.isalnum()]
            case "typo":
                assert (
                    len(old) == len(new) and sum(a != b for a, b in zip(old, new, strict=True)) == 1
                )
            case "contraction":
                marks = [text.count("'") + text.count("’") for text in (old, new)]
                assert marks[0] != marks[1]
            case "spelling" | "morphology":
                # One word for another that begins alike.
                gone, come = Counter(old.split()) - Counter(new.split()), Counter(new.split())
                come -= Counter(old.split())
                assert gone.total() == come.total() == 1
                assert next(iter(gone))[:1] == next(iter(come))[:1]
            case "abbreviation" | "synonym":
                assert Counter(old.split()) != Counter(new.split())
