"""Every generator draws what its definition says, and the same for the same seed."""

import re

import numpy as np
import pytest

from sparse_jax.circuits.generators import GENERATORS, words
from sparse_jax.studies.circuits import paper
from tests.sparse_jax.circuits.word_tokenizer import KINDS, STORY_KINDS


def draws(name, count=50, seed=0):
    rng = np.random.default_rng(seed)
    return [GENERATORS[name].draw(rng) for _ in range(count)]


@pytest.mark.parametrize("name", ["copy", "copy_unspaced"])
def test_copy_is_continued_by_the_last_letter_of_the_first_copy(name):
    lengths = set()
    for example in draws(name, 200):
        clean, corrupt = (re.split(", ", text) for text in (example.clean, example.corrupt))
        separator = " " if name == "copy" else ""
        assert clean[0] == clean[1] + example.answers[0]
        assert corrupt[0] == clean[1] + example.wrong_answers[0]
        letters = clean[0].split() if separator else list(clean[0])
        assert len(letters) == len(set(letters))
        assert corrupt[1] == clean[1] and len(corrupt[0]) == len(clean[0])
        lengths.add(len(letters))
    # Copying from a fixed distance would be right for one length alone.
    assert lengths == set(range(10, 19))


@pytest.mark.parametrize("name", ["ioi", "ioi_flip", "ioi_rephrased", "ioi_long"])
def test_the_indirect_object_is_the_name_that_occurs_once(name):
    templates = set()
    for example in draws(name):
        templates.add(example.template)
        clean, corrupt = (
            [word for word in re.findall(r"\w+", text) if word in words("names")]
            for text in (example.clean, example.corrupt)
        )
        (right,), (wrong,) = example.answers, example.wrong_answers
        assert sorted(clean) == sorted([right[1:], wrong[1:], wrong[1:]])
        assert clean[2] == wrong[1:]
        if name == "ioi_flip":
            assert corrupt == [*clean[:2], right[1:]]
        else:
            assert len(set(corrupt)) == 3 and not set(corrupt) & set(clean)
        assert example.clean.split()[-1] == example.corrupt.split()[-1] == "to"
    assert len(templates) == (3 if name in ("ioi", "ioi_flip") else 2)


def test_right_years_are_those_after_the_first():
    first_years = set()
    for example in draws("greater_than", 400):
        start = re.search(r"\d{4}", example.clean)[0]
        century, year = start[:2], int(start[2:])
        assert example.clean.endswith(f" {century}")
        assert example.corrupt == example.clean.replace(start, f"{century}01")
        assert [int(text) for text in example.wrong_answers] == list(range(year + 1))
        assert [int(text) for text in example.answers] == list(range(year + 1, 100))
        first_years.add(year)
    assert min(first_years) == 2 and max(first_years) == 98


@pytest.mark.parametrize("name", ["docstring", "docstring_printed"])
def test_the_docstring_goes_on_with_the_third_argument(name):
    for example in draws(name):
        arguments = re.search(r"\(self, (.*)\)", example.clean)[1].split(", ")
        documented = re.findall(r":param (\w+):", example.clean)
        assert example.answers == (f" {arguments[2]}",)
        assert documented == arguments[:2]
        assert example.wrong_answers == tuple(f" {name}" for name in documented)
        assert re.findall(r":param (\w+):", example.corrupt) == documented[::-1]
        others = re.search(r"\(self, (.*)\)", example.corrupt)[1].split(", ")
        assert not set(others) & set(arguments)
        last = "\n    param" if name == "docstring_printed" else "\n    :param"
        assert example.clean.endswith("\n    :param") and example.corrupt.endswith(last)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_seed_gives_the_same_examples_and_another_gives_others(name):
    assert draws(name, 10) == draws(name, 10)
    assert draws(name, 10) != draws(name, 10, seed=1)


@pytest.mark.parametrize("kind", [*KINDS, *STORY_KINDS])
def test_no_word_is_twice_in_a_list(kind):
    assert len(set(words(kind))) == len(words(kind)) >= 10


def test_long_prompts_of_other_wordings_have_no_ratio_of_the_paper():
    assert paper.published("ioi", "heads", "prompt").ratio == 2.2
    assert "ioi_long" in {each.task for each in paper.RATIOS}
    for component in ("heads", "token_edges"):
        assert paper.published("ioi_long", component, "prompt") is None
