"""What blocks read, stored results and the papers' numbers; tables and numbers as text."""

from collections.abc import Iterable, Sequence
import functools
from pathlib import Path
import re
from typing import Any

from lm_jax.assets import papers
from lm_jax.run.files import read_json
from lm_jax.run.stored_results import load_stored

ROOT = Path(__file__).parents[2]
MODELS = {"protot": "ProtoT", "llama": "LLaMA", "mamba": "Mamba", "deltanet": "DeltaNet"}


@functools.cache
def summary(name: str) -> Any:
    """`summary.json` of a stored result; `tools.render_docs` has compared it with its digest."""
    return load_stored(ROOT / "results", name).summary()


def conditions(name: str) -> str:
    """Date, commit, device and version of jax of a stored result, in one line."""
    result = load_stored(ROOT / "results", name)
    found = read_json(result.folder / "provenance.json")["conditions"]
    named = {"date": "", "commit": "commit ", "device": "", "cores": "cores: ", "jax": "jax "}
    facts = ", ".join(f"{label}{found[key]}" for key, label in named.items() if key in found)
    return f"(`results/{name}`: {facts}.)\n"


@functools.cache
def published(paper: str) -> dict[str, Any]:
    """The numbers of a paper: `published/<paper>.toml`."""
    return papers.tables(paper)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is on the left, as every other."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(re.sub(r"\|  (?=\|)", "| ", "| " + " | ".join(line) + " |\n") for line in lines)


BRACKETS = "{} [{}, {}]"


def interval(
    value: dict[str, float], spec: str, scale: float = 1.0, form: str = "{} ({} to {})"
) -> str:
    """An estimate with its 95 % interval, such as `0.466 (0.453 to 0.480)`.

    Args:
      value: interval of a summary, whose middle is its `estimate`, `mean` or `value`.
      spec: format of its numbers.
      scale: factor of its numbers.
      form: text around the estimate and the two ends.
    """
    low, high = (f"{scale * value[end]:{spec.lstrip('+')}}" for end in ("low", "high"))
    (middle,) = (value[name] for name in ("estimate", "mean", "value") if name in value)
    return form.format(f"{scale * middle:{spec}}", low, high)
