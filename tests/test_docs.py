"""The documents say what the code does: schemas, and the README's Python runs."""

from pathlib import Path
import re

import pytest

from polyattn_jax import schema

ROOT = Path(__file__).parent.parent


def documented_columns(heading: str) -> list[str]:
    text = (ROOT / "docs" / "polyattn.md").read_text("utf-8")
    section = text.split(f"### {heading}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| ([a-z0-9_, ]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in cell.split(", ") if name != "column"]


def test_documented_columns_of_rows():
    assert documented_columns("rows.parquet") == ["model", *schema.ROWS.names, "head_type"]


def test_documented_columns_of_answers():
    assert documented_columns("answers.parquet") == ["model", *schema.ANSWERS.names]


@pytest.mark.real("smollm2")
def test_python_of_the_readme_runs():
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["out"].records["attn.pattern"].shape == (30, 1, 9, 5, 5)
