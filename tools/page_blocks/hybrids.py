"""Tables of searches for heads that may have a recipe: `iaj polyattn check --hybrid`."""

from typing import Any

from tools.page_blocks.sources import summary, table


def hybrids(*names: str) -> str:
    """The sets of heads that searches tried: what they keep, and what they lose.

    Args:
      *names: stored results of searches with one task.
    """
    rows = []
    for name in names:
        found = summary(name)
        for each in found["frontier"]:
            random = each["seed"] is not None
            rows.append(
                (
                    f"{found['model']}, {found['recipe']}",
                    f"{each['kept']} {'at random' if random else 'that cost most'}",
                    f"{100 * each['state'] / found['softmax_state']:.0f} %",
                    _change(each["text"]["change"]),
                    f"{_right(each['needle'])} of {each['needle']['accuracy']['n']}",
                    each["needle"]["verdict"],
                    "yes" if each["accepted"] else "no",
                )
            )
    heads = ("model, recipe", "heads with softmax", "cache left", "text, nats per token")
    return table((*heads, "needles found", "needle", "may be used"), rows)


def _right(answers: dict[str, Any]) -> int:
    return round(answers["accuracy"]["estimate"] * answers["accuracy"]["n"])


def _change(interval: dict[str, float]) -> str:
    return f"{interval['estimate']:+.3f} ({interval['low']:+.3f} to {interval['high']:+.3f})"
