"""Tasks of embedded text: what counts as an overlap, and how splits are made."""

import numpy as np
import pytest

from lm_jax.errors import BadInputError
from protot_jax.studies.glue import embedded
from protot_jax.studies.glue.readers import Split

REPORTED = (
    "it 's a charming and often affecting journey . ",
    "does n't offer much to those who like their comedies dark and quick",
    "a very good one",
    "fine",
)


@pytest.mark.parametrize(
    "text",
    [
        "It's a charming and often affecting journey!",
        # Within a longer sentence.
        "Some say it's a CHARMING and often affecting journey, some do not.",
        "Doesn't offer much to those who like their comedies dark and quick.",
        # A run of eight words from the middle.
        "Give it to those who like their comedies dark and leave",
        "Hardly a very good one -LRB- for me -RRB-",
        "Fine.",
        # Within a reported sentence.
        "and often affecting journey",
    ],
)
def test_a_text_that_shares_a_sentence_or_eight_words_overlaps(text):
    assert embedded.overlaps(REPORTED)(text)


@pytest.mark.parametrize(
    "text",
    [
        # Seven words of a longer sentence.
        "to those who like their comedies dark or not",
        # Three words of a sentence of four, and a whole one of one.
        "a very good film",
        "it is fine by me",
    ],
)
def test_shorter_runs_do_not(text):
    assert not embedded.overlaps(REPORTED)(text)


def film_file(rows):
    lines = ["id\tsentiment\ttext", *(f"{i + 1}\t{r}\t{text}" for i, (r, text) in enumerate(rows))]
    return "\r\n".join(lines) + "\r\n"


SUBJECTS = ("plot", "actor", "scene", "score", "end", "start", "joke", "fight", "chase", "dance")
VERBS = ("drags", "shines", "moves", "bores", "lifts", "fails", "wins", "sinks", "sings", "hurts")


def film_rows(count):
    """Sentences of five words that no two share in full, with ratings of both signs and 0."""
    return [
        (
            (i % 7 - 3) / 2,
            f"{SUBJECTS[i % 10]} {VERBS[i // 10 % 10]} n{i} m{i * i} k{i + 1}",
        )
        for i in range(count)
    ]


def test_no_sentence_of_training_or_selection_overlaps_with_a_reported_one():
    rows = film_rows(1200)
    leaked = [rows[4][1], rows[60][1].upper(), f"so {rows[777][1]} , he said"]
    texts = [(text,) for text in [*leaked, "a sentence of its own here"]]
    reported = Split(texts, np.array([1.0, 0.0, 1.0, 0.0]))
    films = embedded.parse_films(film_file(rows), "films.tsv")
    data = embedded.film_data(films, reported, sha256="")
    overlap = embedded.overlaps(text for text, *_ in reported.texts)
    kept = [text for split in (data.train, data.selection) for (text,) in split.texts]
    assert not any(map(overlap, kept))
    zeros = sum(rating == 0 for rating, _ in rows)
    dropped = sum(rows[i][0] != 0 for i in (4, 60, 777))
    assert len(kept) == len(rows) - zeros - dropped
    assert data.counts["left out for overlap with reported sentences"] == dropped
    # Labels are the signs of the ratings.
    by_text = {text: rating for rating, text in rows}
    for split in (data.train, data.selection):
        wanted = [float(by_text[text] > 0) for (text,) in split.texts]
        assert split.targets.tolist() == wanted


def test_whole_blocks_of_neighbours_are_held_out():
    films = embedded.parse_films(film_file(film_rows(1000)), "films.tsv")
    data = embedded.rating_data(films, sha256="")
    places = {film.text: film.place for film in films}
    folds = [
        {places[text] // embedded.BLOCK % embedded.FOLDS for (text,) in split.texts}
        for split in (data.selection, data.evaluated["held-out films"], data.train)
    ]
    assert folds == [{0}, {1}, set(range(2, 10))]


def test_a_sentence_that_is_there_twice_is_read_once():
    rows = [(1.0, "It 's good"), (-1.0, "bad"), (2.0, "it's GOOD !")]
    films = embedded.parse_films(film_file(rows), "films.tsv")
    assert [film.rating for film in films] == [1.0, -1.0]


def test_another_layout_of_the_films_is_refused():
    with pytest.raises(BadInputError, match=r"films\.tsv, line 3: not an id, a rating and a text"):
        embedded.parse_films(film_file([(1.0, "a")]) + "2\tx\tb\r\n", "films.tsv")


def article(title, place):
    context = f"{title} lies in {place}. Dr. Who came later! It has no sea, but {title} has a lake."
    ask = {"is_impossible": False, "id": "0"}
    return {
        "title": title,
        "paragraphs": [
            {
                "context": context,
                "qas": [
                    ask
                    | {
                        "question": f"Where does {title} lie?",
                        "answers": [{"text": place, "answer_start": context.index(place)}],
                    },
                    # The answer is a whole text of two sentences: no sentence holds it.
                    ask | {"question": "What?", "answers": [{"text": context, "answer_start": 0}]},
                    {"is_impossible": True, "id": "1", "question": "No?", "answers": []},
                ],
            }
        ],
    }


def test_a_question_gets_the_sentence_of_its_answer_and_the_likest_other():
    squad = {"data": [article(f"Town{i}", f"Land{i}") for i in range(9)]}
    data = embedded.question_data(squad, sha256="")
    reported, selection = data.evaluated["held-out articles"], data.selection
    # Articles 0 and 7, 1 and 8, and the five between.
    assert [len(split) for split in (reported, selection, data.train)] == [4, 4, 10]
    assert reported.texts[0] == ("Where does Town0 lie?", "Town0 lies in Land0.")
    assert reported.texts[1] == ("Where does Town0 lie?", "It has no sea, but Town0 has a lake.")
    # Class 0 is entailment.
    assert reported.targets.tolist() == [0.0, 1.0] * 2
    assert sum(data.counts.values()) == 9


@pytest.mark.real("films", "mc")
def test_the_real_films_and_their_overlap_with_the_validation_split():
    data = embedded.read_embedded("films")
    reported = data.evaluated["SST-2 validation"]
    assert len(reported) == 872
    assert int(reported.targets.sum()) == 444
    assert data.counts["film sentences"] == 10_603
    assert data.counts["equal to a reported sentence"] == 731
    overlap = embedded.overlaps(text for text, *_ in reported.texts)
    assert not any(
        overlap(text) for split in (data.train, data.selection) for (text,) in split.texts
    )
    assert (len(data.train), len(data.selection)) == (8_741, 1_000)


@pytest.mark.real("wiki")
def test_the_real_questions_are_split_by_article():
    data = embedded.read_embedded("qnli_like")
    splits = (data.train, data.selection, data.evaluated["held-out articles"])
    sentences = [{sentence for _, sentence in split.texts} for split in splits]
    assert not (sentences[0] & sentences[1] or sentences[0] & sentences[2])
    assert [split.targets.mean() for split in splits] == [0.5, 0.5, 0.5]
