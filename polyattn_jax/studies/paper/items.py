"""Every table and figure of the paper, and why some have no number of ours."""

from collections.abc import Collection
import dataclasses

from polyattn_jax.studies.paper.results import Unmeasured

_COPYING = "copying in config.ablation_suites"
_LARGER = "iaj polyattn paper --models=FOLDER audits it where its weights are at hand"


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


ITEMS = (
    Item("Table 1", "unsafe rows at b = 0", settings="prompts of induction, MQAR or copying"),
    Item("Table 2", "recipes on literary openings", settings="copying in config.suites"),
    Item("Table 3", "recipes on needles"),
    Item("Table 4", "contrasts of the matched diagnostic", "its cells are cells of Table 5"),
    Item("Table 5", "matched diagnostic", settings="recipes of the table in config.recipes"),
    Item("Table 6", "decisiveness on literary openings, 5 draws", "Table 27 has 20 draws"),
    Item(
        "Table 7",
        "envelopes of the target mass",
        "inequalities and no measurement; the tests check them on random rows",
    ),
    Item("Table 8", "bound against measure", settings="induction prompts"),
    Item(
        "Table 9",
        "ablation at p = 4 on literary openings",
        "another run of Figure 3, with --config.ablation_recipe=relu_p4_bauto",
    ),
    Item("Table 10", "medians of rows at b = 0", settings="prompts of induction, MQAR or copying"),
    Item("Table 11", "rows at b_auto", settings="prompts of induction, MQAR or copying"),
    Item("Table 12", "top K heads by recipe", settings="recipes of the table in config.recipes"),
    Item("Table 13", "intervals of Table 5", "they stand beside the paper's numbers of Table 5"),
    Item("Table 14", "answer's key as target", settings="recipes of the table in config.recipes"),
    Item("Table 15", "S of the sigmoid", settings="sigmoid_b0 in config.recipes"),
    Item("Table 16", "head types at both ends", settings="induction prompts and 40 heads or more"),
    Item("Table 17", "top K against random sets", settings="config.ablation_heads"),
    Item("Table 18", "unsafe rows of Qwen3-8B", f"another model; {_LARGER}"),
    Item("Table 19", "two needles", settings="two_needles in config.suites"),
    Item("Table 20", "long context", settings="needle in config.suites"),
    Item("Table 21", "decoys", settings="decoys in config.suites"),
    Item("Table 22", "pass keys", settings="pass_key in config.suites"),
    Item("Table 23", "unsafe rows of Llama-3.2-3B", f"another model; {_LARGER}"),
    Item(
        "Table 24",
        "recipes on three Llamas",
        f"its column of Llama-3.2-1B is that of Table 3, the others are other models; {_LARGER}",
    ),
    Item("Table 25", "ablation of Llama-3.2-3B", f"another model; {_LARGER}"),
    Item("Table 26", "single heads on needles", settings="config.single_heads"),
    Item("Table 27", "20 random sets on literary openings", settings=_COPYING),
    Item(
        "Table 28",
        "500 prompts of another seed",
        "another run of Table 3, with --config.niah_n=500 --config.seed=15000",
    ),
    Item("Table 29", "one bias for all models", settings="relu:p=4,b=1 in config.recipes"),
    Item("Table 30", "RULER, one key", settings="ruler_paper_single in config.suites"),
    Item("Table 31", "unsafe rows on RULER", settings="ruler_paper_single in config.suites"),
    Item("Table 32", "RULER, four keys", settings="ruler_paper_multi in config.suites"),
    Item(
        "Figure 1",
        "least safe degrees, predicted and measured",
        "the report of each audit draws it; its counts are in Table 8",
    ),
    Item(
        "Figure 2",
        "phase plot of heads",
        "the report of each audit draws it; the paper prints no numbers of it",
    ),
    Item("Figure 3", "ablation on literary openings", settings=_COPYING),
    Item("Figure 4", "ablation on needles", settings="config.ablation_heads"),
    Item("Figure 5", "unsafe rows over length", settings="induction in config.suites"),
    Item("Figure 6", "Figure 1 again", "see Figure 1"),
    Item("Appendix I", "induction answered by softmax", settings="induction in config.suites"),
    Item("Appendix J", "b_auto"),
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
