"""Tables of decoding with softmax and with recipes: `iaj polyattn bench`."""

from statistics import median

from tools.page_blocks.sources import summary, table

_SOFTMAX = "softmax"


def decoding(name: str) -> str:
    """Milliseconds per token and megabytes of every method, and ratios to softmax by turn.

    Args:
      name: a stored result.
    """
    found = summary(name)
    by_place = {(each["length"], each["method"]): each for each in found["results"]}
    rows = []
    for (length, method), each in by_place.items():
        softmax = by_place[length, _SOFTMAX]
        ratios = [a / b for a, b in zip(softmax["seconds"], each["seconds"], strict=True)]
        times = [1e3 * seconds for seconds in each["seconds"]]
        faster = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        smaller = f"{softmax['state_bytes'] / each['state_bytes']:.1f}"
        rows.append(
            (
                f"{length:,}",
                method,
                f"{median(times):.1f} ({min(times):.1f} to {max(times):.1f})",
                f"{each['state_bytes'] / 1e6:,.1f}",
                "–" if method == _SOFTMAX else faster,
                "–" if method == _SOFTMAX else smaller,
            )
        )
    heads = ("tokens before", "method", "ms per token", "kept, MB")
    return table((*heads, "times as fast as softmax", "times smaller"), rows)
