"""Targets are located at their last occurrence; sentences without one are skipped."""

import json

import pytest

from lm_jax.errors import BadInputError, UsageError
from protot_jax.analysis.token_ids import open_ids, word_ids
from protot_jax.studies import interventions
from protot_jax.studies.interventions import paper
from tests.protot_jax.studies.interventions import small_models


@pytest.fixture(scope="module")
def tokenizer():
    return small_models.tokenizer()


def sentence(target, text, where="f.jsonl:1"):
    return interventions.Sentence("c", target, text, where)


def test_the_target_is_the_last_occurrence_and_its_first_token(tokenizer):
    repeated = sentence("Town", "the town and a town, the townhouse")
    cases = interventions.locate([repeated], tokenizer)
    ids = open_ids(tokenizer, repeated.text)
    (town,) = word_ids(tokenizer, ["town"])
    (place,) = cases.target_NT[0].nonzero()[0]
    # bos the town and a town: the fifth word, not the second, and not within another word.
    assert place + 1 == 5
    assert cases.tokens_NS[0, place + 1] == town[0]
    assert cases.tokens_NS[0].tolist() == ids
    assert tokenizer.eos_id not in ids

    longer = interventions.locate([repeated, sentence("townhouse", repeated.text)], tokenizer)
    assert longer.target_NT.sum(1).tolist() == [1, 1]
    whole = interventions.locate(
        [sentence("townhouse", repeated.text)], tokenizer, all_subtokens=True
    )
    assert whole.target_NT.sum() == len(word_ids(tokenizer, ["townhouse"])[0]) > 1


def test_rows_are_padded_and_the_target_may_come_first(tokenizer):
    cases = interventions.locate(
        [sentence("house", "house"), sentence("river", "a house of the river")], tokenizer
    )
    assert cases.tokens_NS.shape == (2, 6)
    assert cases.tokens_NS[0, 2:].tolist() == [0] * 4
    assert cases.target_NT.argmax(1).tolist() == [0, 4]


def test_sentences_without_their_target_are_counted_while_others_remain(tokenizer):
    bad = [
        sentence("river", "the house in the town", "f.jsonl:7"),
        sentence("€", "the house of €", "f.jsonl:8"),
    ]
    cases = interventions.locate([*bad, sentence("house", "a house")], tokenizer)
    assert len(cases.sentences) == 1
    assert [(one.sentence.where, one.reason) for one in cases.skipped] == [
        ("f.jsonl:7", "'river' does not occur in the sentence"),
        ("f.jsonl:8", "'€' is not in the vocabulary"),
    ]
    with pytest.raises(BadInputError, match=r"f\.jsonl:7: 'river' does not occur .*and 1 more"):
        interventions.locate(bad, tokenizer)
    with pytest.raises(BadInputError, match=r"f\.jsonl:8: '€' is not in the vocabulary; give"):
        interventions.locate(bad[1:], tokenizer)
    with pytest.raises(BadInputError, match="the word 'łóżko' is not in the vocabulary"):
        word_ids(tokenizer, ["house", "łóżko"])


def test_special_tokens_in_a_sentence_are_text(tokenizer):
    cases = interventions.locate([sentence("town", "a <eos> town")], tokenizer)
    assert tokenizer.eos_id not in cases.tokens_NS


def test_both_file_formats_give_the_same_sentences(tmp_path):
    rows = [
        {"concept": "a", "target": "x", "text": "an x"},
        {"concept": "b", "target": "y", "text": 'a "y"'},
    ]
    jsonl = tmp_path / "s.jsonl"
    jsonl.write_text("\n\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    tsv = tmp_path / "s.tsv"
    lines = ["concept\ttarget\ttext", *("\t".join(row.values()) for row in rows)]
    tsv.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    results = [interventions.read(path) for path in (jsonl, tsv)]
    parts = [[(s.concept, s.target, s.text) for s in each] for each in results]
    assert parts[0] == parts[1] == [tuple(row.values()) for row in rows]
    assert [s.where for s in results[0]] == ["s.jsonl:1", "s.jsonl:3"]
    assert [s.where for s in results[1]] == ["s.tsv:2", "s.tsv:3"]
    assert len(interventions.read(jsonl, concept="b")) == 1
    with pytest.raises(BadInputError, match="has no concept 'd'; known: a, b"):
        interventions.read(jsonl, concept="d")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.txt", b"a", "is not a .jsonl or .tsv file"),
        ("s.jsonl", b"", "has no sentence"),
        ("s.jsonl", b"\nno", r"s\.jsonl:2: not JSON"),
        ("s.jsonl", b'{"target": "a"}', r"s\.jsonl:1: not an object with the fields concept"),
        ("s.jsonl", b'{"concept": "a", "target": " ", "text": "b"}', "target must be a text"),
        ("s.jsonl", b'{"concept": "a", "target": 1, "text": "b"}', "target must be a text"),
        ("s.jsonl", b"\xff", r"s\.jsonl:1: not UTF-8 at byte 0"),
        ("s.tsv", b"a\tb\tc", r"s\.tsv:1: the first line must be concept, target, text"),
        ("s.tsv", b"concept\ttarget\ttext\na\tb", r"s\.tsv:2: 2 columns"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        interventions.read(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"none\.tsv: No such file"):
        interventions.read(tmp_path / "none.tsv")


def test_shipped_sentences_contain_their_targets():
    """As many sentences as the paper has, and at least five for each concept of a corpus."""
    counts = {"women and girls": 14, "COVID": 21, "New Zealand": 4, "mental health": 4}
    of_speeches = ("war", "Congress", "Treasury", "Mexico")
    for concept in (*paper.tables(), *of_speeches, "album", "species", "season", "County"):
        result = interventions.shipped(concept)
        assert len(result) == counts.get(concept, len(result)) >= 4
        for one in result:
            assert one.target.lower() in one.text.lower()
        if concept not in counts:
            assert len(result) >= 5
    with pytest.raises(UsageError, match="did you mean 'Congress'"):
        interventions.shipped("Congres")


def test_the_paper_s_numbers_are_those_of_its_tables():
    """Their counts and extremes, as in the text of the paper."""
    tables = {concept: table.columns for concept, table in paper.tables().items()}
    assert {name: [len(c.rows) for c in columns] for name, columns in tables.items()} == {
        "women and girls": [12, 12, 12],
        "COVID": [11, 14, 16],
        "New Zealand": [4],
        "mental health": [4],
    }
    female, male, control = tables["women and girls"]
    assert min(row.reinitialise for row in female.rows) == -17.80
    assert max(row.reinitialise for row in male.rows) == 11.50
    assert max(abs(row.reinitialise) for row in control.rows) < 1
    # The gap of the first context under masking: 33.6 points.
    assert male.rows[0].mask_write - female.rows[0].mask_write == pytest.approx(33.55)
    (zealand,) = tables["New Zealand"]
    assert zealand.mean("mask_write") == pytest.approx((-21.5 - 12.5 - 2.3 - 0.2) / 4)
