"""Prompts of a user's file: one JSON object a line, whatever its strings hold."""

import json

import pytest

from lm_jax.errors import BadInputError
from protot_jax.studies.judging import prompts


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_may_hold_other_separators(mark, tmp_path):
    rows = [{"prompt": f"a{mark}b {i}", "reference": f"{mark}c"} for i in range(3)]
    file = tmp_path / "mine.jsonl"
    text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    found = prompts.read(file, count=10)
    assert found.prompts == tuple(row["prompt"] for row in rows)
    assert found.references == (f"{mark}c",) * 3
    # Blank lines count in the number of a line.
    file.write_text(f"{text}\n\n{{")
    with pytest.raises(BadInputError, match=r"mine\.jsonl:7: not JSON"):
        prompts.read(file, count=10)
