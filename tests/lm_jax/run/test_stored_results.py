"""Stored results: what `result.toml` may say, numbers by their paths, and agreement of two runs."""

import json

import pytest

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import file_digest
from lm_jax.run.stored_results import (
    Tolerance,
    compare_summaries,
    flatten_values,
    list_results,
    load_stored,
)

SUMMARY = {"loss": 2.0, "rows": [{"n": 3, "right": True, "name": "a"}], "seconds": 9.0}


def store(root, *, reproduce='[reproduce]\ncommand = "x {workdir}"\ndevice = "d"\n', **changes):
    folder = root / "study" / "name"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    digest = changes.get("digest") or file_digest(folder / "summary.json")["sha256"]
    (folder / "result.toml").write_text(
        f'title = "t"\n{changes.get("extra", "")}\n{reproduce}\n'
        f'[files]\n"summary.json" = "{digest}"\n'
    )
    return folder


def test_a_result_is_read_with_its_digests(tmp_path):
    store(tmp_path)
    assert list_results(tmp_path) == ["study/name"]
    result = load_stored(tmp_path, "study/name")
    assert result.summary() == SUMMARY and result.changed_files() == []


@pytest.mark.parametrize("digit", range(10))
def test_a_changed_digit_is_a_changed_file(tmp_path, digit):
    folder = store(tmp_path)
    text = (folder / "summary.json").read_text()
    changed = text.replace("2.0", f"{digit}.0")
    (folder / "summary.json").write_text(changed)
    expected = [] if changed == text else ["summary.json"]
    assert load_stored(tmp_path, "study/name").changed_files() == expected


def test_a_missing_file_is_a_changed_file(tmp_path):
    folder = store(tmp_path)
    (folder / "summary.json").unlink()
    assert load_stored(tmp_path, "study/name").changed_files() == ["summary.json"]


def test_a_wrong_name_is_refused_with_the_nearest(tmp_path):
    store(tmp_path)
    with pytest.raises(BadInputError, match="study/name"):
        load_stored(tmp_path, "study/nam")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reproduce": ""}, "not_reproducible"),
        ({"reproduce": '[reproduce]\ncommand = "x"\ndevice = "d"\n'}, "workdir"),
        ({"extra": 'tilte = "u"'}, "tilte"),
        ({"extra": "broken"}, "result.toml"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, changes, message):
    store(tmp_path, **changes)
    with pytest.raises(CorruptError, match=message):
        load_stored(tmp_path, "study/name")


def test_values_have_their_paths():
    assert dict(flatten_values(SUMMARY)) == {
        "loss": 2.0,
        "rows.0.n": 3.0,
        "rows.0.right": "true",
        "rows.0.name": "a",
        "seconds": 9.0,
    }


def test_a_changed_verdict_disagrees():
    stored, again = {"verdict": "preserve", "held": True}, {"verdict": "no-go", "held": False}
    assert [each.agrees for each in compare_summaries(stored, again, ())] == [False, False]


def test_each_number_is_held_to_the_first_tolerance_that_fits_it():
    again = {"loss": 2.1, "rows": [SUMMARY["rows"][0] | {"n": 4}], "seconds": 1.0, "new": 0.0}
    tolerances = (
        Tolerance("loss", "seeds", relative=0.06),
        Tolerance("*seconds", "machine", compared=False),
        Tolerance("rows.*", "count", absolute=0.5),
    )
    compared = {each.path: each for each in compare_summaries(SUMMARY, again, tolerances)}
    assert {path: each.agrees for path, each in compared.items()} == {
        "loss": True,
        "rows.0.n": False,
        "rows.0.right": True,
        "rows.0.name": True,
        "seconds": True,
        "new": False,
    }
    assert compared["loss"].allowed == pytest.approx(0.12)
    assert not compared["seconds"].compared


def test_without_a_tolerance_numbers_are_equal():
    (loss,) = compare_summaries({"loss": 1.0}, {"loss": 1.0 + 1e-12}, ())
    assert not loss.agrees
