"""Model cards: the README.md of an exported model, in Markdown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "README.md"
# The lines around the YAML of a card.
_FENCE = "---\n"
# The title of a model whose gates are in a file beside its weights (`hub.GATES`).
SPARSE_TITLE = "A model with sparse attention"


def card(title: str, about: str, facts: Mapping[str, Any], use: str) -> str:
    """A model card.

    Args:
      title: what it is, in a few words.
      about: how it came about.
      facts: numbers and names by what they are, a table.
      use: how to load it, its limits and licence.
    """
    rows = "\n".join(f"| {name} | {shown(value)} |" for name, value in facts.items())
    return f"# {title}\n\n{about}\n\n| | |\n|---|---|\n{rows}\n\n{use}\n"


def is_of_sparse(folder: Path) -> bool:
    """Whether a folder's card describes a model with gates."""
    file = folder / CARD
    if not file.is_file():
        return False
    text = file.read_bytes().decode("utf-8", errors="replace")
    return without_front_matter(text).startswith(f"# {SPARSE_TITLE}\n")


def is_of_hub(file: Path) -> bool:
    """Whether a file is a card as `iaj push` writes it, with YAML for the hub before it."""
    return file.name == CARD and file.read_bytes().startswith(_FENCE.encode())


def without_front_matter(text: str) -> str:
    """A card without the YAML before it."""
    if not text.startswith(_FENCE):
        return text
    _, closed, body = text.removeprefix(_FENCE).partition(f"\n{_FENCE}")
    return body.lstrip("\n") if closed else text


def portable(source: str) -> str:
    """The name of a text or model for a card, which is read on other machines too."""
    return Path(source).name if Path(source).is_absolute() else source


def shown(value: Any) -> str:
    """A fact as it stands in the table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
