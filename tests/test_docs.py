"""The documents say what the code does: names, schemas, and the README's Python runs."""

import importlib
import importlib.util
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


OURS = r"(?:lm_jax|protot_jax|sparse_jax|polyattn_jax|kernels|tools|iaj)"


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_every_module_function_and_file_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text("utf-8")
    for name in sorted(set(re.findall(rf"(?<![\w/-]){OURS}(?!\.md\b)(?:\.[A-Za-z_]\w*)+", text))):
        assert exists(name), f"{document} names {name}"
    files = rf"(?<![\w/])(?:{OURS}|configs|tests|docs)/[\w/.-]+\.(?:py|md|json|jsonl|toml|css)"
    for name in sorted(set(re.findall(files, text))):
        assert (ROOT / name).exists(), f"{document} names {name}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or a member of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            # What stands before the last dot is no package.
            continue
        if spec is None:
            continue
        member = importlib.import_module(module)
        for part in parts[length:]:
            if not hasattr(member, part):
                return False
            member = getattr(member, part)
        return True
    return False
