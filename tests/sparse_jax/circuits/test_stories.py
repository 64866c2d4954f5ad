"""Tasks of stories: what is right follows from the prompt, and a story model knows it."""

from collections import Counter
import functools
import re

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.weights.load import open_pretrained
from sparse_jax.circuits.generators import stories, words
from sparse_jax.circuits.metrics import answers_right
from sparse_jax.circuits.runs import Batch, CircuitModel
from sparse_jax.circuits.tasks import make_task
from sparse_jax.studies.circuits.settings import CircuitConfig

NAMES = sorted(stories.DRAWS)
MANY = dict(zip(words("plurals")[::2], words("plurals")[1::2], strict=True))


def draws(name, count=300):
    rng = np.random.default_rng(0)
    return [stories.DRAWS[name](rng) for _ in range(count)]


def found(text, choices):
    """The words of a text that are among some, in its order."""
    return [word for word in re.findall(r"\w+", text) if word in choices]


def receiver(text):
    """The one of two people who is not the last one that is named."""
    people = found(text, {*words("girls"), *words("boys")})
    (other,) = {*people} - {people[-1]}
    assert len({*people}) == 2
    return other


def by_gender(girl, boy):
    def answer(text):
        (name,) = {*found(text, {*words("girls"), *words("boys")})}
        child = found(text, {"girl", "boy"})
        is_girl = name in words("girls")
        assert child in ([], ["girl" if is_girl else "boy"])
        return girl if is_girl else boy

    return answer


def thing(text):
    (toy,) = {*found(text, words("toys"))}
    return toy


def verb(text):
    (noun,) = {*found(text, words("plurals"))}
    return "were" if noun in MANY.values() else "was"


def counted(text):
    number = found(text, {"one", *words("numbers")})
    (noun,) = found(text, words("plurals")) or ["dog"]
    one = next(each for each, many in MANY.items() if noun in (each, many))
    return one if number[0] == "one" else MANY[one]


def feeling(text):
    (did,) = found(text, {"found", "lost"})
    return {"found": "happy", "lost": "sad"}[did]


RIGHT = {
    "giving": receiver,
    "thanks": receiver,
    "pronoun": by_gender("she", "he"),
    "possessive": by_gender("her", "his"),
    "reflexive": by_gender("herself", "himself"),
    "thing": thing,
    "number": verb,
    "count": counted,
    "feeling": feeling,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_right_word_follows_from_the_prompt_and_the_wrong_one_from_the_corrupt_prompt(name):
    right = RIGHT[name.removeprefix("story_").removesuffix("_rephrased")]
    examples = draws(name)
    for example in examples:
        assert example.answers != example.wrong_answers
        clean, corrupt = (re.findall(r"\w+", text) for text in (example.clean, example.corrupt))
        assert len(clean) == len(corrupt)
        if name == "story_count_rephrased":
            # No noun is named, and the two answers are of any.
            answers = [example.answers[0][1:], example.wrong_answers[0][1:]]
            order = answers if "one" in clean else answers[::-1]
            assert MANY[order[0]] == order[1]
            continue
        assert example.answers == (f" {right(example.clean)}",)
        assert example.wrong_answers == (f" {right(example.corrupt)}",)
    assert len({example.clean for example in examples}) >= 100
    assert len({example.template for example in examples}) == 2
    # Neither answer is had by saying one word always.
    most = Counter(example.answers for example in examples).most_common(1)[0][1]
    assert most <= len(examples) / 2 + 3 * np.sqrt(len(examples) / 4)


def test_every_story_has_other_wordings_to_which_its_circuits_are_transferred():
    assert {*stories.REPHRASED, *stories.REPHRASED.values()} == {*NAMES}
    config = CircuitConfig(tasks=("story_giving", "story_thing"))
    assert config.rephrasings == {
        "story_giving": "story_giving_rephrased",
        "story_thing": "story_thing_rephrased",
    }
    texts = [wording for each in stories.WORDINGS for wording in each.values()]
    assert len(set(texts)) == len(texts) == 2 * len(NAMES)
    for name, other in stories.REPHRASED.items():
        assert not {each.template for each in draws(name)} & {
            each.template for each in draws(other)
        }


@functools.cache
def tokenizer_of(model):
    return open_pretrained(model).tokenizer


@pytest.mark.real("stories15m", "smollm2")
@pytest.mark.parametrize("model", ["stories15m", "smollm2"])
@pytest.mark.parametrize("name", NAMES)
def test_every_example_fits_the_tokenizer_of_a_pretrained_model(name, model):
    task = make_task(name, tokenizer_of(model), count=200, seed=0, max_length=256)
    assert {*task.manifest.dropped} <= {"drawn before"}


@pytest.fixture(scope="module")
def story_model():
    return lm_jax.load_pretrained("stories15m")


@jax.jit
def last_logits(model, batch):
    logits = model.forward(batch.clean_BT, batch.valid_BT, logits_at=batch.at_B2).logits
    return logits[:, 0], logits[:, 1]


@pytest.mark.real("stories15m")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_story_model_solves_every_task(name, story_model):
    task = make_task(name, story_model.tokenizer, count=100, seed=1, max_length=256)
    batch = Batch.of(task)
    logits = last_logits(CircuitModel.of(story_model), batch)
    right_B = answers_right(batch.metric, *logits, batch.continuations)
    assert float(right_B.mean()) >= 0.8
