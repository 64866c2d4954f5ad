"""The long texts of the report: every one has a reader, and no value slips in or is left out."""

from pathlib import Path
import re

import jinja2
import pytest

from lm_jax.report.prose import Prose
from polyattn_jax import report
from polyattn_jax.studies import audit

_PROSE = Prose("polyattn_jax.report")


@pytest.mark.parametrize("package", [report, audit])
def test_every_text_of_the_template_is_in_a_report(package):
    folder = Path(package.__file__).parent
    texts = re.findall(r"{% macro (\w+)", (folder / "report.html.j2").read_text("utf-8"))
    code = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    calls = re.findall(r"_PROSE\(\s*\"(\w+)\"", code)
    assert sorted(texts) == sorted(calls)


def test_values_are_escaped_and_line_breaks_are_spaces():
    text = _PROSE("own_prompts", file="<b>&\n mine")
    assert text.startswith("<p>The prompts of &lt;b&gt;&amp; mine, under the same recipes.")
    assert "\n" not in text and "  " not in text


def test_a_remark_that_does_not_apply_is_left_out():
    values = {"b_auto": "1.5", "resamples": "100"}
    decided = _PROSE("unsafe_caption", **values, few=None, undecided=None)
    assert "100 resamples. Given the float32 scores" in decided
    both = _PROSE("unsafe_caption", **values, few=30, undecided="2 values of S lie")
    assert "100 resamples, Student's t with fewer than 30 prompts. 2 values of S lie so" in both


def test_a_missing_or_unknown_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="file"):
        _PROSE("own_prompts")
    with pytest.raises(TypeError, match="files"):
        _PROSE("own_prompts", file="a", files="b")
    with pytest.raises(AttributeError, match="own_prompt"):
        _PROSE("own_prompt")
