"""A finished run is shown for the inputs that it was made from, and refused for others."""

import shutil

import pytest

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import write_json
from lm_jax.run.finished import file_inputs, finish_time, is_finished, mark_finished
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.workdir import FINISHED_FILE

MODEL = ModelIdentity("a" * 64, "b" * 64, "c" * 64)
GIVEN = {"dense": MODEL.text, "config.text": "f" * 64}


def test_a_finished_run_has_a_time_and_an_unfinished_one_has_none(tmp_path):
    assert finish_time(tmp_path, GIVEN) is None and not is_finished(tmp_path)
    mark_finished(tmp_path, GIVEN)
    assert finish_time(tmp_path, GIVEN).endswith("+00:00") and is_finished(tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dense": ModelIdentity("0" * 64, "b" * 64, "c" * 64).text}, "dense: weights aaaa"),
        ({"dense": ModelIdentity("a" * 64, "0" * 64, "c" * 64).text}, "dense: configuration b"),
        ({"dense": ModelIdentity("a" * 64, "b" * 64, "0" * 64).text}, "dense: tokenizer cccc"),
        ({"config.text": "0" * 64}, "config.text: content ffffffffffff, not 000000000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_input_is_refused_and_the_part_named(tmp_path, changed, words):
    mark_finished(tmp_path, GIVEN)
    with pytest.raises(BadInputError, match=f"the results of other inputs .*{words}.*; put those"):
        finish_time(tmp_path, GIVEN | changed)


def test_an_input_that_is_gone_is_said_not_to_be_compared(tmp_path, capsys):
    mark_finished(tmp_path, GIVEN)
    assert finish_time(tmp_path, {"dense": MODEL.text})
    assert "config.text cannot be compared, being no longer there" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_compared_by_the_weights_in_its_provenance(tmp_path, capsys):
    """The marker had no inputs then; the last start is the one that finished."""
    for digest in ("0" * 64, "a" * 64):
        record_provenance(tmp_path, collect_provenance(data={"dense": digest}))
    write_json(tmp_path / FINISHED_FILE, {"finished": "2026-01-01T00:00:00+00:00"})
    assert finish_time(tmp_path, GIVEN) == "2026-01-01T00:00:00+00:00"
    assert "by its weights alone" in capsys.readouterr().err
    with pytest.raises(BadInputError, match="dense: weights aaaaaaaaaaaa, not 0000"):
        finish_time(tmp_path, {"dense": ModelIdentity("0" * 64, "b" * 64).text})


def test_an_input_that_was_not_recorded_is_said_not_to_be_compared(tmp_path, capsys):
    record_provenance(tmp_path, collect_provenance(data={"pairs": "0" * 64}))
    write_json(tmp_path / FINISHED_FILE, {"finished": "2026-01-01T00:00:00+00:00"})
    assert finish_time(tmp_path, GIVEN)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "dense, config.text cannot be compared, as the run did not record them" in said


def test_files_and_folders_are_known_by_their_content(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "one").write_text("1")
    (folder / "two").write_text("2")
    named = {"file": folder / "one", "folder": folder, "none": "", "gone": tmp_path / "gone"}
    first = file_inputs(named)
    assert first.keys() == {"file", "folder"}
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert file_inputs({"folder": moved})["folder"] == first["folder"]
    (folder / "two").write_text("3")
    second = file_inputs(named)
    assert second["file"] == first["file"] and second["folder"] != first["folder"]


@pytest.mark.parametrize("marker", [[], {}, {"inputs": {}}])
def test_a_damaged_marker_is_named(tmp_path, marker):
    write_json(tmp_path / FINISHED_FILE, marker)
    with pytest.raises(CorruptError, match=f"{FINISHED_FILE} does not say when"):
        finish_time(tmp_path, GIVEN)
