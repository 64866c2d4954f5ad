"""The paper's robustness numbers (section 5.2, appendix A.5) of our models and slices."""

from collections.abc import Mapping
import functools
from typing import Any

from lm_jax.assets.papers import tables

# Two forms of a slice stand beside one column.
_OTHER_FORMS = {
    "morphology_any": "morphology",
    "synonym_pos": "synonym",
    "typo_any": "typo",
}


@functools.cache
def _paper() -> Mapping[str, Any]:
    return tables("protot")


def divergence(model: str, name: str) -> float | None:
    """Table 3's entry of a model and a slice; None where there is none."""
    return _paper()["table_3"].get(model, {}).get(_OTHER_FORMS.get(name, name))


def mediated(name: str) -> Mapping[str, float]:
    """Table 4's row of a slice, and 1 - JS_clamped / JS_base of its printed means, which the paper
    does not print; empty where there is none."""
    row = _paper()["table_4"].get(_OTHER_FORMS.get(name, name))
    return row | {"ratio_of_means": 1 - row["js_clamped"] / row["js_base"]} if row else {}


def flip(model: str, name: str) -> Mapping[str, float]:
    """Table 5's entries of a model and a slice; empty where the sentences end in no tag."""
    flips = _paper()["table_5"].get(model, {})
    return flips.get(name.removesuffix("_tag"), {}) if name.endswith("_tag") else {}


def strength(name: str) -> Mapping[str, float]:
    """Table 12's similarity and edit distance of a slice; empty where there is none."""
    return _paper()["table_12"].get(_OTHER_FORMS.get(name, name), {})
