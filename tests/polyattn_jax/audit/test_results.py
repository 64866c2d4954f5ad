"""`summary.json` and `check.json` are read back as written, or refused with every fault named."""

import dataclasses
import json
import math
from pathlib import Path

import jsonschema
import pytest

from lm_jax.errors import CorruptError
from lm_jax.run.files import read_json, write_json
from lm_jax.run.results import json_schema, load_result
from polyattn_jax.audit.results import AuditSummary, CheckResult, LossInterval
from polyattn_jax.audit.results.provenance import read_provenance

# Written by commit 63bffe7, from dicts, and cut to two entries of each list.
GOLDEN = Path(__file__).parents[2] / "golden" / "polyattn"
FILES = [(GOLDEN / "summary.json", AuditSummary), (GOLDEN / "check.json", CheckResult)]


def assert_read_back(path, cls, copy):
    """Asserts that what `path` holds fits the schema and is written again byte by byte."""
    jsonschema.validate(json.loads(path.read_bytes()), json_schema(cls))
    write_json(copy, load_result(path, cls))
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("path", "cls"), FILES)
def test_files_of_untyped_code_are_read_and_written_again(path, cls, tmp_path):
    assert_read_back(path, cls, tmp_path / "copy.json")


def test_the_files_of_a_run_are_read_back_as_they_were_written(
    audited, run_check, prompts_file, tmp_path
):
    assert_read_back(audited / "summary.json", AuditSummary, tmp_path / "copy.json")
    arguments = ["--recipe=relu:p=4,b=auto", f"--prompts={prompts_file}"]
    outcome = run_check(*arguments, f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 11, outcome.err
    assert_read_back(tmp_path / "run" / "summary.json", CheckResult, tmp_path / "copy.json")
    summary = load_result(audited / "summary.json", AuditSummary)
    assert summary.provenance == read_provenance(audited, summary.config)


def test_what_an_audit_did_not_measure_is_null(tmp_path):
    summary = load_result(FILES[0][0], AuditSummary)
    first, *others = summary.prevalence
    empty = dataclasses.replace(
        first,
        active_rows=0,
        softmax=None,
        unsafe={},
        softmax_active=None,
        unsafe_active={},
        ties={},
        undecided={},
        median=None,
    )
    loss = LossInterval(math.nan, 0.0, math.inf, 1)
    copy = dataclasses.replace(summary.controls.second_copy, loss=loss)
    summary = dataclasses.replace(
        summary,
        prevalence=(empty, *others),
        controls=dataclasses.replace(summary.controls, second_copy=copy),
        head_types=None,
    )
    write_json(tmp_path / "summary.json", summary)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["controls"]["second_copy"]["loss"] == {
        "estimate": None,
        "low": 0.0,
        "high": "inf",
        "n": 1,
    }
    assert (read["prevalence"][0]["median"], read["head_types"]) == (None, None)
    assert_read_back(tmp_path / "summary.json", AuditSummary, tmp_path / "copy.json")
    # NaN equals nothing, and is spelled as itself.
    assert repr(load_result(tmp_path / "summary.json", AuditSummary)) == repr(summary)


def changed(tree, place, value):
    """The tree with another value at a place; without the entry where the value is Ellipsis."""
    *parents, last = place
    node = tree
    for step in parents:
        node = node[step]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return tree


FAULTS = [
    (("verdicts", 0, "reason"), ..., "verdicts[0].reason is missing; give it a str"),
    (("sweep", 1, "accuracy", "low"), "none", "sweep[1].accuracy.low = 'none' (str); give a float"),
    (("sweep", 0, "lost"), -1, "sweep[0].lost = -1 (int); give a int >= 0"),
    (("sweep", 0, "p_value"), 1.5, "sweep[0].p_value = 1.5 (float); give a float from 0 to 1"),
    (("sweep", 0, "p_value"), None, "sweep[0].p_value = None (NoneType); give a float from 0 to 1"),
    (("bound", 0, "agree", "estimate"), "inf", "agree.estimate = 'inf' (str); give a float"),
    (("verdicts", 0, "verdict"), "nogo", "verdicts[0].verdict = 'nogo' is not one of the choices"),
    (("bound", 1, "fales_negative"), 1, "fales_negative is not a field of BoundAgreement; did you"),
    (("config", "sweep_length"), 65, "config.sweep_length = 65 is not in config.niah_lengths"),
    (("provenance", "git", "dirty"), 0, "provenance.git.dirty = 0 (int); give a bool"),
    (("degrees", 0), "2", "degrees[0] = '2'; give a int or a float"),
]


@pytest.mark.parametrize(("place", "value", "words"), FAULTS)
def test_a_fault_is_refused_with_its_place_and_the_remedy(tmp_path, place, value, words):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(changed(json.loads(FILES[0][0].read_bytes()), place, value)))
    with pytest.raises(CorruptError) as caught:
        load_result(path, AuditSummary)
    message = str(caught.value)
    assert message.startswith(f"{path} is no AuditSummary: ") and words in message
    assert message.endswith("; restore it, or start again in another --workdir")


def test_nan_is_refused_where_a_number_must_be(tmp_path):
    path = tmp_path / "check.json"
    tree = changed(json.loads(FILES[1][0].read_bytes()), ("p_value",), math.nan)
    path.write_text(json.dumps(tree))
    with pytest.raises(CorruptError, match=r"check\.json is no CheckResult: p_value = nan"):
        load_result(path, CheckResult)


@pytest.mark.parametrize(
    ("name", "finished"), [("summary.json", True), ("calibration.json", False)]
)
def test_a_command_refuses_a_damaged_file(run_audit, audited, tmp_path, name, finished):
    """A finished audit reads the summary; one that resumes reads the calibration."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in audited.iterdir():
        if path.is_file() and (finished or path.name != "finished.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    write_json(folder / name, read_json(folder / name) | {"model": None, "bias": None})
    outcome = run_audit(folder)
    assert outcome.code == 7
    (line,) = outcome.refusals
    assert f"{folder / name} is no " in line and "restore it" in line
