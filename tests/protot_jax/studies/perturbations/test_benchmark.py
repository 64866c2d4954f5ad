"""The benchmark: limits of sampling, what each check leaves out, the same bytes, and read back."""

from collections import Counter
import dataclasses
import hashlib
import itertools
import json
import math
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from lm_jax.run.results import json_schema, load_result
from lm_jax.study import command, frame
from lm_jax.text.splits import SPLITS
from protot_jax.studies.perturbations import STUDY, backfill, drawing, report, screening
from protot_jax.studies.perturbations import run as run_of_study
from protot_jax.studies.perturbations.results import MEANING_FILE, NOISE_FILE, RECORD, Benchmark
from protot_jax.studies.perturbations.screening import (
    Screen,
    fill,
    keeps_casing,
    whole_sentence,
    zipf,
)
from protot_jax.studies.perturbations.settings import PerturbationsConfig
from protot_jax.studies.robustness import lists, perturb, sentences
from protot_jax.studies.robustness import run as run_of_robustness
from protot_jax.studies.robustness.pairs import make_pairs
from protot_jax.studies.robustness.sentences import KINDS, Pair
from protot_jax.studies.robustness.settings import RobustnessConfig

# Run by `make test-all`.
pytestmark = pytest.mark.long

ANIMALS = ("dog", "horse", "crow", "goat", "sheep", "rabbit", "donkey", "pigeon")
VERBS = ("watched", "followed", "heard", "found", "missed")
PLACES = ("near the river", "in the garden", "behind a wall", "on some hill")


def launched(*flags):
    return command.run(STUDY, ["perturb", *flags])


def lines(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """160 texts of two sentences, 40 lines of dialogue of three to five words, 40 news items."""
    folder = tmp_path_factory.mktemp("corpora")
    texts = [
        f"The {a} {v} the {b} {place}. They do not know the {b} {place}, said the owner."
        for (a, b), v, place in itertools.product(
            itertools.islice(itertools.permutations(ANIMALS, 2), 8), VERBS, PLACES
        )
    ]
    talks = [f"I {v} the {a}!" for a, v in itertools.product(ANIMALS, VERBS)]
    news = [f"A {a} {v} all day. It is a second one." for a in ANIMALS for v in VERBS]
    for name, content in (("text", texts), ("talk", talks), ("news", news)):
        rows = (f"{json.dumps({'text': text})}\n" for text in content)
        (folder / f"{name}.jsonl").write_text("".join(rows), "utf-8")
    return folder


@pytest.fixture(scope="module")
def made(corpora, tmp_path_factory):
    """Folder and flags of a small benchmark of three corpora."""
    folder = tmp_path_factory.mktemp("made") / "out"
    flags = [f"--corpus={corpora}/text.jsonl", f"--corpus=dialogue:{corpora}/talk.jsonl"]
    flags += [f"--corpus=news:{corpora}/news.jsonl", "--pairs=12", "--mix=90", "--licence=CC0"]
    flags += ["--slices=typo,contraction,spelling,abbreviation", f"--splits={','.join(SPLITS)}"]
    assert launched(*flags, f"--workdir={folder}") == 0
    return folder, flags


def test_each_kind_of_text_has_its_limits(corpora, made):
    _, flags = made
    options = PerturbationsConfig(
        corpus=tuple(flag.removeprefix("--corpus=") for flag in flags if "--corpus" in flag),
        mix=90,
        splits=SPLITS,
    )
    counts = Counter()
    origin, sources = drawing.draw(options, counts)
    by_source = {
        name: [text for text, own in origin.items() if own.source == name]
        for name in ("text.jsonl", "talk.jsonl", "news.jsonl")
    }
    # Equal parts of 90, of which every one is a whole sentence here.
    assert [len(found) for found in by_source.values()] == [30, 30, 30]
    assert [source.kind for source in sources] == ["text", "dialogue", "news"]
    for kind, found in zip(("text", "dialogue", "news"), by_source.values(), strict=True):
        words = [len(text.split()) for text in found]
        assert KINDS[kind].shortest <= min(words) and max(words) <= KINDS[kind].longest
    # Four words are too few for a text; the second sentence of a news item is never taken.
    assert any(len(text.split()) == 4 for text in by_source["talk.jsonl"])
    assert not any(text.startswith("It is") for text in by_source["news.jsonl"])
    # Every word of every document is counted, "owner" once in each of 160.
    assert counts["owner"] == 160


def test_further_slices_are_made_where_they_are_named(corpora):
    names = ("typo_any", "morphology_any")
    options = PerturbationsConfig(
        corpus=(f"{corpora}/text.jsonl",), mix=90, pairs=5, slices=names, splits=SPLITS
    )
    noise, _, record = run_of_study.make(options, run_of_study.opened(options, None))
    assert [one.name for one in record.slices[:3]] == [*names, "gender"]
    assert [pair.slice for pair in noise] == [name for name in names for _ in range(5)]
    # Within words too: none of these is left out for being rare.
    for pair in noise[5:]:
        at = next(
            i for i, (a, b) in enumerate(zip(pair.text, pair.perturbed, strict=False)) if a != b
        )
        assert pair.perturbed == f"{pair.text[:at]}s{pair.text[at:]}"


def test_sentences_are_held_out_and_stand_in_no_training_document(tmp_path):
    """Numbered sentences, and one stock phrase that is in every document."""
    stock = "This is the same phrase everywhere."
    documents = [f"Number {i} of {i} has a sentence. {stock}" for i in range(400)]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in documents), "utf-8")
    options = PerturbationsConfig(corpus=(str(file),), mix=4_000)
    origin, (source,) = drawing.draw(options, Counter())
    by_split = {split: [] for split in SPLITS}
    # As `CorpusConfig` splits by default, worked out apart from the benchmark.
    for text in documents:
        key = hashlib.blake2b(text.encode(), digest_size=8, key=bytes(8)).digest()
        point = int.from_bytes(key, "little") / 2**64
        split = "train" if point < 0.94 else "validation" if point < 0.99 else "test"
        by_split[split].append(text.split(". ")[0] + ".")
    assert all(by_split.values())
    assert {text: own.split for text, own in origin.items()} == {
        text: split for split in ("validation", "test") for text in by_split[split]
    }
    assert {own.source for own in origin.values()} == {"text.jsonl"}
    assert source.documents == {split: len(found) for split, found in by_split.items()}
    assert (source.sentences, source.trained) == (len(origin), 1)
    # Asked for, the training split is taken as it is.
    both = dataclasses.replace(options, splits=("train",))
    assert set(drawing.draw(both, Counter())[0]) == {*by_split["train"], stock}


def test_a_source_of_two_kinds_gives_sentences_of_both(tmp_path):
    """Its sentences of 3 words are dialogue alone, those of 20 text alone."""
    texts = [f"Number {i} came. {'Very ' * 17}late came {i}." for i in range(40)]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), "utf-8")
    alone = {"text": Counter(), "dialogue": Counter()}
    wanted = set()
    for kind, counts in alone.items():
        options = PerturbationsConfig(corpus=(f"{kind}:{file}",), mix=4_000, splits=SPLITS)
        wanted |= set(drawing.draw(options, counts)[0])
    both = dataclasses.replace(options, corpus=tuple(f"{kind}:{file}" for kind in alone))
    counts = Counter()
    origin, sources = drawing.draw(both, counts)
    assert set(origin) == wanted and {len(text.split()) for text in origin} == {3, 20}
    assert [(one.kind, one.sentences) for one in sources] == [("text", 40), ("dialogue", 40)]
    # Words are counted once.
    assert counts == alone["text"] == alone["dialogue"]


def test_one_text_corpus_is_at_most_half_of_the_mix(corpora):
    options = PerturbationsConfig(corpus=(f"{corpora}/text.jsonl",), mix=50, splits=SPLITS)
    origin, _ = drawing.draw(options, Counter())
    assert len(origin) == 25


def test_the_record_describes_the_files(made):
    folder, _ = made
    content = json.loads((folder / RECORD).read_text("utf-8"))
    jsonschema.validate(content, json_schema(Benchmark))
    record = load_result(folder / RECORD, Benchmark)
    assert record == frame.load_summary(STUDY, folder)
    data = json.loads((folder / "provenance.json").read_text("utf-8"))["data"]
    assert data.items() >= {name: entry["sha256"] for name, entry in record.files.items()}.items()
    assert {source.licence for source in record.sources} == {"CC0"}
    for name, entry in record.files.items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    noise, flips = (lines(folder / name) for name in record.files)
    for one in record.slices:
        own = [line for line in noise + flips if line["slice"] == one.name]
        both = {(line["text"], line["perturbed"]) for line in own}
        assert len(own) == one.pairs == one.unique_pairs == len(both) == 12
        assert one.built == sum(line["source"] == "built" for line in own) and not one.missing
        assert all(("split" in line) == (line["source"] != "built") for line in own)
        assert one.frames == len({line["frame"] for line in own if "frame" in line})
        assert sum(one.splits.values()) == one.pairs - one.built
        distance = np.mean([sentences.edit_distance(*pair) for pair in both])
        assert one.distance == pytest.approx(distance)
    built = {one.name: one.built for one in record.slices}
    # These texts have no title and no British word, and many places for the others.
    wanted = {"abbreviation": 12, "spelling": 12, "typo": 0, "gender": 12}
    assert {name: built[name] for name in wanted} == wanted
    # Few of the sampled sentences can be contracted.
    assert 0 < built["contraction"] < 12


def test_both_files_are_read_back_and_nothing_is_added(run, made):
    for name in (NOISE_FILE, MEANING_FILE):
        slices = () if name == MEANING_FILE else ("typo",)
        config = RobustnessConfig(
            run=(str(run),), sentences=str(made[0] / name), pairs=1, slices=slices
        )
        task = run_of_robustness.inputs(config).loaded
        found = make_pairs(task.subjects, task.given, None, config)
        assert list(found.pairs) == [Pair(**line) for line in lines(made[0] / name)]
        assert not found.skipped


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("The river is near.", True),
        ('"We went there!"', True),
        ("1990 was a good year.", True),
        ("the river is near.", False),
        ("The river is near", False),
        ("The <unk> is near.", False),
        ("= = Early life = =.", False),
        ("It weighs 3 @.@ 5 pounds.", False),
    ],
)
def test_fragments_and_markup_are_no_sentences(text, whole):
    assert whole_sentence(text) == whole


class Encoder:
    """A sentence's vector is its angle, given in degrees as its last word."""

    def __call__(self, texts):
        angles = np.radians([float(text.split()[-1]) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_each_check_leaves_out_what_it_says():
    # 10^5 words: a count of 1 is a Zipf frequency of 4, of 10 one of 5.
    counts = Counter({"the": 99_989, "town": 10, "burg": 1})
    assert zipf("burg", counts) == pytest.approx(4) and zipf("town", counts) == pytest.approx(5)
    assert zipf("absent", counts) == -math.inf
    screen = Screen(counts, 4.5, Encoder(), 0.75, ("synonym",))
    # cos 41 degrees is 0.7547, cos 42 degrees 0.7431.
    pairs = [
        Pair("synonym", "The hill 0", "The town 41"),
        Pair("synonym", "The hill 0", "The town 42"),
        Pair("synonym", "The town 0", "The burg 0"),
        Pair("synonym", "The hill 0", "the town 0"),
        Pair("typo", "The town 0", "The tiwn 90"),
    ]
    assert screen(pairs) == ["", "dissimilar", "rare", "casing", ""]
    assert Screen(counts, 4.5, None, 0.75, ("synonym",))(pairs)[1] == ""
    rejected = Counter()
    assert fill(iter(pairs * 2), 2, screen, rejected) == [pairs[0], pairs[4]]
    assert rejected == {"dissimilar": 1, "rare": 1, "casing": 1}
    assert fill(iter(pairs), 1, screen, Counter()) == [pairs[0]]


def test_casing_is_compared_word_by_word_where_words_are_as_many():
    assert keeps_casing("Doctor Smith came", "Dr. Smith came")
    assert not keeps_casing("Doctor Smith came", "Dr. smith came")
    # Two words become one, and only the first is compared.
    assert keeps_casing("We do not go", "We don't go") and not keeps_casing("It is so", "it's so")


@pytest.mark.parametrize("name", ["abbreviation", "contraction", "spelling", "morphology"])
def test_built_sentences_fill_a_slice_alone(name, monkeypatch):
    nouns = {noun: f"{noun}s" for noun in backfill._COUNTED}
    monkeypatch.setattr(lists, "plurals", lambda: nouns)
    perturbation = (perturb.without_data() | perturb.of_inflections())[name]
    built = backfill.sentences(name, 42)
    assert len(set(built)) == len(built) and built != backfill.sentences(name, 43)
    pairs = list(sentences.candidates(built, name, perturbation, seed=42))
    # Each has one place, and the paper's number of pairs is reached.
    assert len(pairs) == len(built) >= 500
    assert all(whole_sentence(pair.text) for pair in pairs)
    for pair in pairs if name in ("spelling", "morphology") else ():
        both = zip(pair.text.split(), pair.perturbed.split(), strict=True)
        assert sum(old != new for old, new in both) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--corpus=news:",), "--corpus='news:' names no source"),
        (("--config.corpus=()",), "--corpus is missing"),
        (("--corpus=nowhere",), "corpus 'nowhere' is not there"),
        (("--slices=typos",), "--slices: 'typos' is none of"),
        (("--similar=typos",), "did you mean 'typo'"),
        (("--splits=tests",), "--splits: 'tests' is none of train, validation, test"),
        (("--slices=synonym",), "by --wordnet"),
    ],
)
def test_bad_input_is_one_sentence(corpora, flags, message, tmp_path, capsys):
    flags = (f"--corpus={corpora}/text.jsonl", *flags) if "corpus" not in flags[0] else flags
    out = tmp_path / "none"
    assert launched(*flags, f"--workdir={out}") in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not out.exists()


def test_reasons_are_those_of_the_record():
    assert set(screening.REASONS) == {"casing", "dissimilar", "rare"}


def test_the_page_has_what_was_made_what_was_rejected_and_what_is_missing(made):
    record = frame.load_summary(STUDY, made[0])
    first, *others = record.slices
    first = dataclasses.replace(first, pairs=3, rejected={"rare": 4321}, missing="no more texts")
    few = dataclasses.replace(record, slices=(first, *others), similarity="no encoder today")
    for result, missing in ((record, False), (few, True)):
        built = report.build(PerturbationsConfig(), result, Path("run"))
        verdict, pages = str(built.lead[0]), {one.title: one.body for one in built.sections()}
        assert list(pages) == ["Slices", "Sources and licences", "Files"]
        assert all(f"{one.name}<" in pages["Slices"] for one in result.slices)
        assert pages["Sources and licences"].count("CC0") == 3
        assert all(one["sha256"] in pages["Files"] for one in result.files.values())
        assert f"{39 if missing else 48} pairs keep the meaning, and 72 flip it." in verdict
        assert (f"{first.name}: no more texts" in verdict) == missing
        assert ("no encoder today" in verdict) == missing
        assert ("no more texts" in pages["Slices"] and "4,321" in pages["Slices"]) == missing
