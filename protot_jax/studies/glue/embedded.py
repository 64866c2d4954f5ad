"""Three tasks of real text from pinned assets, which are not GLUE tasks and not named like them.

    films          film sentences with people's mean ratings, above or below 0; reported on the
                   official validation split of SST-2
    films_rating   the same ratings as scores; reported on held-out film sentences
    qnli_like      a question and a sentence of its paragraph: is the answer in it; from the
                   development articles of SQuAD 2.0, split by article

The film sentences (Hutto and Gilbert, 2014) come from the same reviews as SST-2: 732 of the 872
sentences of its validation split are among them. A film sentence is left out if it shares with a
reported one a run of eight words, or if one of the two has four to seven words and the other holds
them all in a row, or if they have equal letters and digits. Case, bracket tokens and blanks before
contractions ("it 's", "does n't") do not count. The test split of SST-2 is not in the assets, so
nothing is removed for it: a model of this task must not be submitted.

QNLI was built from SQuAD in the same way, with pairs of low overlap of words left out (Wang et al.,
2018). Here the sentence that holds the answer is paired with the one other sentence of the
paragraph that shares most words with the question, so that classes are equally frequent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
import re

import numpy as np
import pyarrow as pa

from lm_jax import assets
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import file_digest
from protot_jax.studies.glue.readers import Split, TaskData

FILMS, SST2, SQUAD = (
    ("films", "ratings.tsv"),
    ("mc", "sst2/validation.arrow"),
    ("wiki", "squad.json"),
)
ASSETS: Mapping[str, tuple[str, ...]] = {
    "films": ("films", "mc"),
    "films_rating": ("films",),
    "qnli_like": ("wiki",),
}
RUN = 8
# Of a text that is in another one whole.
LEAST_RUN = 4
_LENGTHS = range(LEAST_RUN, RUN + 1)
# Neighbours in the file are of one review, so that whole blocks are held out.
BLOCK, FOLDS = 50, 10
ARTICLE_FOLDS = 7
_BRACKETS = re.compile(r"-[lr][rsc]b-|[\[\](){}]")
_CONTRACTION = re.compile(r"\s*(?:(n)'(t)|'(s|re|ve|m|ll|d))\b")
_WORD = re.compile(r"[a-z0-9]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")


def words(text: str) -> tuple[str, ...]:
    """Runs of letters and digits in lower case, without bracket tokens; "does n't" is "doesnt"."""
    text = _BRACKETS.sub(" ", text.lower())
    return tuple(_WORD.findall(_CONTRACTION.sub(r"\1\2\3", text)))


def key(text: str) -> str:
    """The letters and digits of a text, by which equal texts are found."""
    return "".join(words(text))


def overlaps(reported: Iterable[str]) -> Callable[[str], bool]:
    """A function: whether a text shares a run of words with any of the reported ones.

    A run has eight words, or is a whole text, of either side, of four to seven. Equal texts
    overlap, however short.
    """
    keys, whole, pieces = set(), set(), set()
    for text in reported:
        own = words(text)
        keys.add("".join(own))
        whole.add(own)
        pieces.update(run for length in _LENGTHS for run in _runs(own, length))

    def overlap(text: str) -> bool:
        own = words(text)
        return (
            "".join(own) in keys
            or own in pieces
            or any(run in pieces for run in _runs(own, RUN))
            or any(run in whole for length in _LENGTHS for run in _runs(own, length))
        )

    return overlap


def _runs(own: tuple[str, ...], length: int) -> Iterable[tuple[str, ...]]:
    return (own[i : i + length] for i in range(len(own) - length + 1))


@dataclasses.dataclass(frozen=True)
class Film:
    """A film sentence, its place in the file and its mean rating in [-4, 4]."""

    place: int
    rating: float
    text: str


def parse_films(text: str, where: str) -> list[Film]:
    """The film sentences of a file of three columns (id, mean rating, text) with a header.

    A sentence that has the words of an earlier one is left out.

    Raises:
      BadInputError: a line has another layout.
    """
    films, known = [], set()
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        try:
            _, rating, sentence = cells[0], float(cells[1]), cells[2]
        except (IndexError, ValueError) as error:
            raise BadInputError(
                f"{where}, line {number}: not an id, a rating and a text; run: iaj fetch films"
            ) from error
        if key(sentence) not in known:
            films.append(Film(number - 2, rating, sentence))
        known.add(key(sentence))
    return films


def film_data(films: Sequence[Film], reported: Split, *, sha256: str) -> TaskData:
    """The task `films`: sentences rated above or below 0, reported on another split.

    Args:
      films: films, as `parse_films` gives them.
      reported: the labelled split to report on; films that overlap with it are left out.
      sha256: digest of the file of films.
    """
    rated = [film for film in films if film.rating]
    overlap = overlaps(text for text, *_ in reported.texts)
    kept = [film for film in rated if not overlap(film.text)]
    keys = {key(text) for text, *_ in reported.texts}
    train, selection = _folds(kept, range(1, FOLDS)), _folds(kept, (0,))
    clean = _without(train, selection)
    return TaskData(
        _sentiment(clean, sha256),
        _sentiment(selection, sha256),
        {"SST-2 validation": reported},
        {},
        "Film sentences with the mean rating of people above or below 0 (Hutto and Gilbert, 2014), "
        "reported on the official validation split of SST-2. It is not the training split of "
        "SST-2, which holds 67,349 sentences and phrases.",
        False,
        {
            "film sentences": len(films),
            "rated exactly 0": len(films) - len(rated),
            "equal to a reported sentence": sum(key(film.text) in keys for film in rated),
            "left out for overlap with reported sentences": len(rated) - len(kept),
            "left out for overlap with the selection split": len(train) - len(clean),
        },
    )


def rating_data(films: Sequence[Film], *, sha256: str) -> TaskData:
    """The task `films_rating`: the mean ratings as scores, reported on held-out film sentences."""
    selection, reported = _folds(films, (0,)), _folds(films, (1,))
    train = _folds(films, range(2, FOLDS))
    clean = _without(train, [*selection, *reported])
    clean_selection = _without(selection, reported)
    return TaskData(
        _split(clean, sha256),
        _split(clean_selection, sha256),
        {"held-out films": _split(reported, sha256)},
        {},
        "Film sentences with the mean rating of people from -4 to 4 (Hutto and Gilbert, 2014), in "
        f"blocks of {BLOCK} neighbours of the file. It takes the place of STS-B, of which no "
        "package holds a training split.",
        False,
        {
            "film sentences": len(films),
            "left out for overlap between splits": len(train)
            + len(selection)
            - len(clean)
            - len(clean_selection),
        },
    )


def _folds(films: Sequence[Film], folds: Collection[int]) -> list[Film]:
    return [film for film in films if film.place // BLOCK % FOLDS in folds]


def _without(films: Sequence[Film], others: Sequence[Film]) -> list[Film]:
    overlap = overlaps(film.text for film in others)
    return [film for film in films if not overlap(film.text)]


def _split(films: Sequence[Film], sha256: str, target: Callable[[float], float] = float) -> Split:
    """Films as examples, whose targets are of their ratings."""
    targets = np.array([target(film.rating) for film in films], np.float64)
    return Split([(film.text,) for film in films], targets, sha256=sha256)


def _sentiment(films: Sequence[Film], sha256: str) -> Split:
    return _split(films, sha256, lambda rating: rating > 0)


def question_data(squad: Mapping, *, sha256: str) -> TaskData:
    """The task `qnli_like` from the articles of SQuAD's JSON.

    Of every seven articles the first is reported and the second selects.
    """
    pairs: list[list[tuple[str, str]]] = [[], [], []]
    labels: list[list[float]] = [[], [], []]
    dropped = 0
    for i, article in enumerate(squad["data"]):
        fold = min(i % ARTICLE_FOLDS, 2)
        for paragraph in article["paragraphs"]:
            sentences = list(_sentences(paragraph["context"]))
            for question in paragraph["qas"]:
                if question["is_impossible"]:
                    continue
                chosen = _answer_and_other(question, sentences)
                dropped += chosen is None
                for label, sentence in enumerate(chosen or ()):
                    pairs[fold].append((question["question"], sentence))
                    labels[fold].append(float(label))
    reported, selection, train = (
        Split(texts, np.array(targets, np.float64), sha256=sha256)
        for texts, targets in zip(pairs, labels, strict=True)
    )
    return TaskData(
        train,
        selection,
        {"held-out articles": reported},
        {},
        "A question and a sentence of its paragraph, of the 35 development articles of SQuAD 2.0, "
        "split by article: is the answer in the sentence. Built like QNLI and not QNLI.",
        False,
        {"questions without an answer in one sentence, or with one sentence only": dropped},
    )


def _sentences(context: str) -> Iterable[tuple[int, str]]:
    """Sentences of a paragraph, each with where it begins."""
    start = 0
    for end in [*_SENTENCE_END.finditer(context), None]:
        stop = len(context) if end is None else end.end()
        yield start, context[start:stop].strip()
        start = stop


def _answer_and_other(
    question: Mapping, sentences: Sequence[tuple[int, str]]
) -> tuple[str, str] | None:
    """The sentence that holds the first answer, and the one most like the question without any."""
    first = question["answers"][0]
    answers = {answer["text"].lower() for answer in question["answers"]}
    begins = first["answer_start"]
    holding = [
        text
        for start, text in sentences
        if start <= begins and first["text"] in text and begins < start + len(text)
    ]
    others = [
        text for _, text in sentences if not any(answer in text.lower() for answer in answers)
    ]
    if not holding or not others:
        return None
    asked = set(words(question["question"]))
    return holding[0], max(others, key=lambda text: len(asked & set(words(text))))


def read_embedded(name: str) -> TaskData:
    """The splits of an embedded task, from the asset cache.

    Raises:
      UsageError: there is no such task.
      BadInputError: an asset is not in the cache; the message names the command that fetches it.
    """
    if name not in ASSETS:
        raise UsageError(f"{name} is no embedded task; name one of {', '.join(ASSETS)}")
    missing = [asset for asset in ASSETS[name] if assets.cached(asset) is None]
    if missing:
        raise BadInputError(
            f"the task {name} needs assets that are not in the cache; run: "
            f"iaj fetch {' '.join(missing)}"
        )
    return _BUILDERS[name]()


def _film_file() -> tuple[list[Film], str]:
    path = assets.path(*FILMS)
    return parse_films(path.read_text("utf-8"), str(path)), file_digest(path)["sha256"]


def _read_films() -> TaskData:
    films, sha256 = _film_file()
    return film_data(films, read_sst2(assets.path(*SST2)), sha256=sha256)


def _read_ratings() -> TaskData:
    films, sha256 = _film_file()
    return rating_data(films, sha256=sha256)


def _read_questions() -> TaskData:
    path = assets.path(*SQUAD)
    squad = json.loads(path.read_text("utf-8"))
    return question_data(squad, sha256=file_digest(path)["sha256"])


def read_sst2(path: Path) -> Split:
    """The official validation split of SST-2 from an Arrow file."""
    with pa.memory_map(str(path)) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    targets = np.array([row["label"] for row in rows], np.float64)
    return Split([(row["sentence"],) for row in rows], targets, sha256=file_digest(path)["sha256"])


_BUILDERS: Mapping[str, Callable[[], TaskData]] = {
    "films": functools.cache(_read_films),
    "films_rating": functools.cache(_read_ratings),
    "qnli_like": functools.cache(_read_questions),
}
