"""Readers of the official layouts, on hand-made files, and what they refuse."""

import dataclasses

import pytest

from lm_jax.errors import BadInputError, UsageError
from protot_jax.studies.glue.readers import read_official
from protot_jax.studies.glue.tasks import OFFICIAL, SUBMISSION
from tests.protot_jax.studies.glue import official_files
from tests.protot_jax.studies.glue.official_files import NEXT_LINE, QUOTED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return official_files.write(tmp_path_factory.mktemp("glue"))


# Texts and targets of the training split, targets of the first development split.
WANTED = {
    "cola": ([("It runs.",), (QUOTED,), (NEXT_LINE,)], [1, 0, 1], [1, 0]),
    "sst2": ([("a charm ",), (f"{QUOTED} ",)], [1, 0], [1, 0]),
    "mrpc": ([(QUOTED, "b")], [1], [0]),
    "stsb": ([("a", "b"), ("c", "d")], [5.0, 0.5], [2.5]),
    "rte": ([("a", "b"), ("c", "d")], [0, 1], [1]),
    "wnli": ([("a", "b"), ("a", "c")], [1, 0], [0]),
    "qqp": ([("Why?", "How?"), ("Who?", "Whose?")], [0, 1], [1]),
    "qnli": ([("Who?", "He."), ("When?", "She.")], [0, 1], [0]),
    "mnli": ([("a 0", "b 0"), ("a 1", "b 1"), ("a 2", "b 2")], [0, 1, 2], [0, 1]),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_texts_and_labels_are_those_of_the_file(folder, name):
    data = read_official(name, folder)
    texts, targets, dev = WANTED[name]
    assert list(data.train.texts) == texts
    assert data.train.targets.tolist() == targets
    assert next(iter(data.evaluated.values())).targets.tolist() == dev
    assert data.selection is next(iter(data.evaluated.values()))
    assert all(split.targets is None for split in data.submitted.values())


def test_lines_of_qqp_that_are_broken_are_left_out_and_counted(folder):
    data = read_official("qqp", folder)
    assert data.train.broken == 2
    assert data.counts == {"lines left out": 2}


def test_test_files_are_read_under_the_names_of_a_submission(folder):
    submitted = {}
    for name in OFFICIAL:
        submitted |= read_official(name, folder).submitted
    assert tuple(submitted) == SUBMISSION
    assert submitted["SST-2.tsv"].texts == [("uneasy .",), ("fine",), ("bad",)]
    assert submitted["MRPC.tsv"].texts == [("e", "f")]
    assert submitted["AX.tsv"].texts == [("g", "h"), ("i", "j")]


def test_a_limit_takes_examples_from_all_over_a_split(folder):
    data = read_official("mnli", folder).limited(2)
    assert data.train.texts == [("a 0", "b 0"), ("a 1", "b 1")]
    assert data.train.targets.tolist() == [0, 1]
    assert len(data.submitted["AX.tsv"]) == 2


def changed(tmp_path, file, old, new):
    folder = official_files.write(tmp_path)
    text = official_files.FILES[file]
    assert old in text
    (folder / file).write_bytes(text.replace(old, new).encode(errors="surrogateescape"))
    return folder


REFUSED = {
    "another label": (
        ("sst2", "SST-2/dev.tsv", "bleak \t0", "bleak \tnegative"),
        "line 3, column 'label': 'negative' is none of 0, 1; take the file of the official",
    ),
    "a score beyond the scale": (
        ("stsb", "STS-B/train.tsv", "0.500", "5.5"),
        "line 3, column 'score': '5.5' is no number from 0 to 5",
    ),
    "no number": (("stsb", "STS-B/dev.tsv", "2.5", "nan"), "line 2, column 'score': 'nan'"),
    "a column too few": (
        ("rte", "RTE/train.tsv", "c\td\tnot", "c d\tnot"),
        "line 3: 3 columns, not 4 (index, sentence1, sentence2, label)",
    ),
    "a blank line": (("rte", "RTE/train.tsv", "\n1\t", "\n\n1\t"), "line 3: 1 columns, not 4"),
    "another header": (
        ("qnli", "QNLI/train.tsv", "question\tsentence", "question\tanswer"),
        "line 1: there is no column 'sentence' among index, question, answer, label",
    ),
    "a header where there is none": (
        ("cola", "CoLA/dev.tsv", "gj04\t1", "source\tlabel"),
        "line 1, column 'label': 'label' is none of 0, 1",
    ),
    "another encoding": (
        ("sst2", "SST-2/train.tsv", QUOTED, "caf\udce9"),
        "line 3: it is no UTF-8",
    ),
    "no example": (
        ("wnli", "WNLI/dev.tsv", "0\te\tf\t0\n", ""),
        "dev.tsv has no examples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_layout_is_refused_with_its_place_and_a_remedy(tmp_path, case):
    (name, *change), message = REFUSED[case]
    folder = changed(tmp_path, *change)
    with pytest.raises(BadInputError) as refused:
        read_official(name, folder)
    assert str(folder / change[0]) in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_file_or_folder_is_named(tmp_path):
    folder = official_files.write(tmp_path)
    (folder / "RTE/dev.tsv").unlink()
    with pytest.raises(BadInputError, match=r"RTE/dev\.tsv is not there; put the official files"):
        read_official("rte", folder)
    with pytest.raises(UsageError, match="is no folder; name that of the GLUE files"):
        read_official("rte", folder / "none")
    (folder / "WNLI/test.tsv").unlink()
    assert not read_official("wnli", folder).submitted


def test_only_qqp_leaves_out_broken_lines():
    layouts = {
        name: [task.train, *task.dev.values(), *task.test.values()]
        for name, task in OFFICIAL.items()
    }
    skipping = {
        name for name, each in layouts.items() if any(layout.skips_broken for layout in each)
    }
    assert skipping == {"qqp"}
    # A test file that lost a line would be submitted with every later answer in the wrong place.
    assert not any(layout.skips_broken for layout in OFFICIAL["qqp"].test.values())
    assert dataclasses.replace(OFFICIAL["qqp"]).train.skips_broken
