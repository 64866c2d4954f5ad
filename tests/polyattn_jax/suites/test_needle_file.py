"""Needles in another language, or among lines of code."""

import itertools
import json

import pytest

from lm_jax.errors import BadInputError
from polyattn_jax.suites import named
from polyattn_jax.suites.needle_file import NeedleFile, read_needles
from polyattn_jax.suites.niah import CUE
from tests.polyattn_jax.byte_tokenizer import byte_tokenizer

# Sixty made-up words of three letters.
WORDS = ["".join(letters) for letters in itertools.product("bdfk", "aeiou", "lmn")]
# Sentences and lines of many lengths, so that some of them fill a prompt.
GERMAN = " ".join(f"Die Tür steht {'sehr ' * i}offen." for i in range(1, 7)) + " ".join(
    f" Ein Hund{'e' * i} läuft über den Weg." for i in range(9)
)
LINES = ["import os", "for i in range(3):", "    print(i)", *(f"x{'y' * i} = 1" for i in range(30))]
CODE = "\n\n".join([*LINES, "KEY = other"])


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def build(words, haystack, length=240):
    return named.build(
        "needle",
        byte_tokenizer(),
        haystack=haystack,
        length=length,
        n=5,
        seed=0,
        max_length=256,
        words=words,
    )


def test_a_frame_of_another_language(tmp_path):
    content = {"words": WORDS, "cue": "Das geheime Wort heißt", "end": "!"}
    words = read_needles(write(tmp_path, "de.json", content))
    tokenizer = byte_tokenizer()
    suite = build(words, GERMAN, length=200)
    for prompt in suite.prompts:
        answer = prompt.meta["answer"].strip()
        assert answer in WORDS and prompt.text.startswith(f"Das geheime Wort heißt {answer}! ")
        assert prompt.text.endswith(" Das geheime Wort heißt") and len(prompt.tokens) == 200
        assert tokenizer.decode(prompt.target).strip() == answer


def test_needles_among_lines_of_code(tmp_path):
    content = {"words": WORDS, "cue": "KEY =", "end": "", "lines": True}
    words = read_needles(write(tmp_path, "code.json", content))
    suite = build(words, CODE)
    for prompt in suite.prompts:
        first, *rest, last = prompt.text.split("\n")
        assert (first, last) == (f"KEY ={prompt.meta['answer']}", "KEY =")
        # Whole lines with their indents, but none that has the cue.
        assert rest and set(rest) <= set(LINES)


def test_a_plain_list_has_the_english_frame(tmp_path):
    assert read_needles(write(tmp_path, "words.txt", "apple\ntree  house\n")) == NeedleFile(
        ("apple", "tree", "house"), CUE, ".", False
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", " \n", "has no words; write one a line"),
        ("a.json", {"cue": "It is"}, "words is missing"),
        ("a.json", {"words": ["a"], "cue": "It is "}, "must be a text without space at its ends"),
        ("a.json", {"words": ["a"], "queue": "It is"}, "queue is not a field of NeedleFile"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, content, words):
    with pytest.raises(BadInputError, match=words):
        read_needles(write(tmp_path, name, content))


def test_words_of_too_many_lengths_are_counted_by_their_tokens(tmp_path):
    """Of a tokenizer of bytes, a word has a token more than letters: its space."""
    words = read_needles(write(tmp_path, "words.txt", "\n".join([*WORDS[:45], "house", "stone"])))
    counts = r"nouns: 0 of 47 are one token .* \(45 have 4, 2 have 6\)"
    message = counts + ": .* with 5 more words of 4 tokens$"
    with pytest.raises(BadInputError, match=message):
        build(words, GERMAN)
