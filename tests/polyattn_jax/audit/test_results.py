"""`summary.json` and `check.json` are read back as written, or refused with every fault named."""

import json
from pathlib import Path

import jsonschema
import pytest

from lm_jax.errors import CorruptError
from lm_jax.run.files import write_json
from lm_jax.run.results import json_schema, load_result
from polyattn_jax.audit.results import AuditSummary, EarlierCheck

# Written by commit 63bffe7, from dicts, and cut to two entries of each list.
GOLDEN = Path(__file__).parents[2] / "golden" / "polyattn"
FILES = [(GOLDEN / "summary.json", AuditSummary), (GOLDEN / "check.json", EarlierCheck)]


def assert_read_back(path, cls, copy):
    """Asserts that what `path` holds fits the schema and is written again byte by byte."""
    jsonschema.validate(json.loads(path.read_bytes()), json_schema(cls))
    write_json(copy, load_result(path, cls))
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("path", "cls"), FILES)
def test_files_of_untyped_code_are_read_and_written_again(path, cls, tmp_path):
    assert_read_back(path, cls, tmp_path / "copy.json")


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
    (("verdicts", 0, "reason"), ..., "verdicts[0].reason is missing; give it a text"),
    (("sweep", 0, "lost"), -1, "sweep[0].lost = -1 (int); give a whole number >= 0"),
    (("verdicts", 0, "verdict"), "nogo", "verdicts[0].verdict = 'nogo' is not one of the choices"),
    (("bound", 1, "fales_negative"), 1, "fales_negative is not a field of BoundAgreement; did you"),
    (("config", "sweep_length"), 65, "config.sweep_length = 65 is not in config.niah_lengths"),
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
