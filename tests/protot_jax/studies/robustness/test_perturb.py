"""Every perturbation: on known sentences, deterministic, and changing exactly what it says."""

from collections import Counter
import difflib
import gzip
import re

import numpy as np
import pytest

from lm_jax.errors import BadInputError
from protot_jax.studies.robustness import WordNet, lists, meaning, perturb

SENTENCES = (
    "Doctor Smith said that it is not true, and they do not know the company.",
    "He's a favourite neighbor of the big leader who didn't assist them!",
    "The children will help the old town to analyze every answer, for example in October",
    "the United States cannot defend the labour parties of the city.",
)
# Sense keys as in WordNet's index.sense: word%part of speech, offset, sense number, count.
SENSES = """\
assist%2:41:00:: 00000001 1 9
help%2:41:00:: 00000001 1 20
aid%2:41:00:: 00000001 1 3
give_a_hand%2:41:00:: 00000001 1 3
abet%2:41:00:: 00000001 1 0
large%3:00:00:: 00000002 1 30
big%3:00:00:: 00000002 1 40
town%1:15:00:: 00000003 1 5
town%1:14:00:: 00000004 2 5
settlement%1:15:00:: 00000003 1 5
old%3:00:00:: 00000005 1 5
antediluvian%5:00:00:: 00000005 1 5
"""


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordnet")
    (folder / "index.sense").write_text(SENSES, "utf-8")
    return WordNet(folder)


@pytest.fixture(scope="module")
def made(wordnet):
    """All but morphology, which needs an asset."""
    return perturb.without_data() | perturb.of_wordnet(wordnet)


def words(text):
    return re.findall(r"[\w'’-]+", text)


# By slice and sentence, what is replaced by what.
CHANGES = {
    "abbreviation": (
        [("Doctor", "Dr."), ("company.", "co.")],
        [],
        [("for example", "e.g."), ("October", "Oct.")],
        [("United States", "U.S.")],
    ),
    "contraction": (
        [("is not", "isn't"), ("do not", "don't")],
        [("didn't", "did not")],
        [],
        [("cannot", "can't")],
    ),
    "punctuation": (
        [(",", ""), ("company.", "company")],
        [("them!", "them")],
        [(",", ""), ("October", "October.")],
        [("city.", "city")],
    ),
    "spelling": (
        [],
        [("favourite", "favorite"), ("neighbor", "neighbour")],
        [("analyze", "analyse")],
        [("labour", "labor")],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_changes_of_known_sentences(made, name):
    """Over many seeds, all of the possible changes and no other occur."""
    for sentence, changes in zip(SENTENCES, CHANGES[name], strict=True):
        drawn = {made[name](sentence, np.random.default_rng(seed)) for seed in range(40)}
        assert drawn == ({sentence.replace(*each) for each in changes} or {None})


def test_each_slice_is_deterministic_and_draws_differ(made):
    for name, perturbation in made.items():
        for sentence in SENTENCES:
            first, again = (perturbation(sentence, np.random.default_rng(7)) for _ in range(2))
            assert first == again and first != sentence, name
    drawn = {made["typo"](SENTENCES[0], np.random.default_rng(seed)) for seed in range(20)}
    assert len(drawn) > 10


@pytest.mark.parametrize("name", ["typo", "typo_any"])
def test_a_typo_is_one_inner_letter_of_a_longer_word(made, name):
    far = 0
    for seed in range(200):
        text = SENTENCES[seed % 4]
        new = made[name](text, np.random.default_rng(seed))
        (at,) = [i for i, (a, b) in enumerate(zip(text, new, strict=True)) if a != b]
        (word,) = [match for match in re.finditer(r"[A-Za-z]+", text) if at in range(*match.span())]
        assert len(word[0]) > 3 and word.start() < at < word.end() - 1
        assert new[at].isalpha() and new[at].isupper() == text[at].isupper()
        # The released code takes any letter.
        far += new[at].lower() not in lists.keyboard()[text[at].lower()]
    assert far == 0 if name == "typo" else far > 100


def test_the_keyboard_is_symmetric_and_has_known_neighbours():
    keyboard = lists.keyboard()
    assert set(keyboard["g"]) == set("tfhvb") and "y" in keyboard["h"]
    assert set(keyboard["q"]) == set("wa") and set(keyboard["s"]) == set("wadzx")
    assert all(a in keyboard[b] for a, near in keyboard.items() for b in near)


def test_synonyms_are_of_the_dominant_sense_and_of_like_length(wordnet, made):
    assert wordnet("help") == ("aid", "assist") and wordnet("assist") == ("aid", "help")
    assert wordnet("big") == ("large",) and wordnet("abet") == ()
    # Two senses with five counts each: none is dominant.
    assert wordnet("town") == () and wordnet("settlement") == ("town",)
    counts = set()
    for seed in range(60):
        new = made["synonym"](SENTENCES[1], np.random.default_rng(seed))
        if new is None:
            # Three were to be replaced, and the sentence has two.
            continue
        pairs = [(a, b) for a, b in zip(words(SENTENCES[1]), words(new), strict=True) if a != b]
        assert all(b in wordnet(a) and abs(len(a) - len(b)) < 4 for a, b in pairs)
        counts.add(len(pairs))
    assert counts == {1, 2}
    # Twelve letters for three, and a word with a capital: neither is replaced.
    assert made["synonym"]("an old Big one", np.random.default_rng(0)) is None


# A verb in its second sense too; "in" as a noun and, more often, an adverb.
MORE_SENSES = """\
draw%1:04:00:: 00000011 2 0
drawing%1:04:00:: 00000011 1 4
haul%1:04:00:: 00000012 1 1
draw%1:04:01:: 00000012 1 7
incongruous_haul%1:04:00:: 00000012 1 0
draw%2:35:00:: 00000013 1 60
pull%2:35:00:: 00000013 1 50
inch%1:23:00:: 00000014 1 9
in%1:23:00:: 00000014 1 1
in%4:02:00:: 00000015 1 30
inwards%4:02:00:: 00000015 1 4
cart%1:06:00:: 00000016 1 4
wagon%1:06:00:: 00000016 1 0
big%4:02:00:: 00000017 1 1
boastfully%4:02:00:: 00000017 1 0
heavy%5:00:00:: 00000018 2 3
grave%3:00:00:: 00000019 1 3
heavy%3:00:00:: 00000019 1 9
weighty%5:00:00:: 00000018 1 3
"""


@pytest.fixture(scope="module")
def more_senses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("more")
    (folder / "index.sense").write_text(SENSES + MORE_SENSES, "utf-8")
    return WordNet(folder)


def drawn(perturbation, text):
    return {perturbation(text, np.random.default_rng(seed)) for seed in range(60)}


def test_all_senses_of_a_word_are_known_in_wordnets_order(more_senses):
    # By part of speech however rare they are, and untagged words too.
    assert more_senses.senses("draw") == (
        ("noun", ("haul",)),
        ("noun", ("drawing",)),
        ("verb", ("pull",)),
    )
    assert more_senses.senses("heavy") == (("adj", ("grave",)), ("adj", ("weighty",)))
    assert more_senses.senses("cart") == (("noun", ("wagon",)),)
    assert more_senses.senses("absent") == ()
    # The default has none of what was never tagged, and only dominant senses.
    assert more_senses("cart") == () and more_senses("draw") == ("pull",)


def test_the_filter_keeps_words_of_one_part_of_speech(more_senses):
    one = perturb.of_wordnet(more_senses)["synonym_pos"]._replace(counts=(1.0,))
    # "draw" is a noun and a verb, "big" an adverb too, "in" a function word.
    assert drawn(one, "They draw a big cart in.") == {"They draw a big wagon in."}
    assert drawn(one, "a heavy cart") == {"a grave cart", "a heavy wagon"}
    assert drawn(one, "Cart it, they draw") == {None}


def test_morphology_any_does_not_look_at_whole_words():
    nouns = lists.substring_nouns()
    assert len(set(nouns)) == len(nouns) and all(noun + "s" != noun for noun in nouns)
    morphology = perturb.without_data()["morphology_any"]
    assert drawn(morphology, "The car had a carpet, Car.") == {
        "The cars had a carpet, Car.",
        "The car had a carspet, Car.",
    }
    # Of a plural one more is made, and letters are where they are.
    assert drawn(morphology, "Two ships.") == {"Two shipss."}
    assert drawn(morphology, "No word of it") == {None}


def test_morphology_is_a_plural_or_a_singular(monkeypatch, tmp_path):
    table = (
        "city,noun,cities\nchild,noun,children\nhelp,noun,helps\nhelp,verb,helped,,helping,helps"
    )
    table += "\nleaf,noun,leaves/leafs\nsheep,noun,sheep\nParty,noun,Parties\nleave,noun,leaves\n"
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(table.encode()))
    monkeypatch.setattr(lists.assets, "path", lambda *names: tmp_path / "table.csv.gz")
    lists.plurals.cache_clear()
    forms = lists.plurals()
    lists.plurals.cache_clear()
    # "help" is a verb too, "leaves" the plural of two nouns, sheep do not change, names are left.
    assert forms == {
        "city": "cities",
        "cities": "city",
        "child": "children",
        "children": "child",
        "leaf": "leaves",
        "leave": "leaves",
    }
    monkeypatch.setattr(lists, "plurals", lambda: forms)
    (morphology,) = perturb.of_inflections().values()
    drawn = {morphology(SENTENCES[2], np.random.default_rng(seed)) for seed in range(9)}
    assert drawn == {SENTENCES[2].replace("children", "child")}
    assert morphology("Cities grow.", np.random.default_rng(0)) == "City grow."


@pytest.mark.real("inflections")
def test_real_plurals():
    forms = lists.plurals()
    assert len(forms) > 20_000 and "help" not in forms
    for one, many in [("child", "children"), ("city", "cities"), ("company", "companies")]:
        assert forms[one] == many and forms[many] == one


def test_lists_are_what_they_say():
    spelling = lists.spelling()
    assert len(spelling) > 200 and all(spelling[spelling[word]] == word for word in spelling)
    assert all(difflib.SequenceMatcher(None, *pair).ratio() > 0.55 for pair in spelling.items())
    long_forms = [long for long, _ in lists.abbreviations()]
    assert len(set(long_forms)) == len(long_forms) > 60
    assert all(long.count("*") == short.count("*") for long, short in lists.abbreviations())
    both = [long for long, short in lists.contractions()]
    assert len(set(both)) == len(both) > 60


@pytest.mark.parametrize("name", meaning.SLICES)
def test_flips_change_one_word_or_the_tag(name):
    pairs = meaning.flips(name, 50, seed=3)
    assert len(set(pairs)) == 50 and pairs == meaning.flips(name, 50, seed=3)
    assert pairs != meaning.flips(name, 50, seed=4)
    # As many pairs of each of at least eight frames, but for the last round.
    counts = Counter(flip.frame for flip in pairs)
    assert len(counts) >= 8 and max(counts.values()) - min(counts.values()) <= 1
    for _, first, second in pairs:
        changed = set(words(first)) ^ set(words(second))
        if name.endswith("_tag"):
            assert first.endswith("]") and first.split(" [")[0] == second.split(" [")[0]
        if name == "negation":
            assert changed == {"not"}
        else:
            assert len(changed) == 2


def test_a_folder_that_is_not_wordnets_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"index\.sense cannot be read"):
        WordNet(tmp_path)
    (tmp_path / "index.sense").write_text("a line of something else\n")
    with pytest.raises(BadInputError, match="is no line of WordNet"):
        WordNet(tmp_path)
