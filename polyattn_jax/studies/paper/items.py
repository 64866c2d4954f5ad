"""Every table and figure of the paper, and why some have no number of ours."""

from collections.abc import Collection
import dataclasses

from lm_jax.assets import papers
from polyattn_jax.studies.paper.results import Unmeasured


@dataclasses.dataclass(frozen=True)
class Item:
    """A table, a figure or an appendix of the paper.

    Attributes:
      name: "Table 3".
      title: what it shows.
      reason: why no run has a number of it; empty if one can have.
      settings: what a run needs to have one.
    """

    name: str
    title: str
    reason: str = ""
    settings: str = ""


ITEMS = tuple(
    Item(claim["item"], claim["shows"], claim.get("no_number", ""), claim.get("settings", ""))
    for claim in papers.tables("polyattn")["claim"]
)


def unmeasured(measured: Collection[str]) -> tuple[Unmeasured, ...]:
    """The items without a number of ours, with the reason; `measured` names those that have one."""
    return tuple(
        Unmeasured(
            item.name, item.title, item.reason or f"not in these settings; add {item.settings}"
        )
        for item in ITEMS
        if item.name not in measured
    )


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Names of items in the order of `ITEMS`."""
    return tuple(item.name for item in ITEMS if item.name in names)
