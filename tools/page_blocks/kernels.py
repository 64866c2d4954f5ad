"""Tables of docs/kernels/gpu.md: kernels against their references, and their times."""

from collections import defaultdict
import statistics
from typing import Any

from tools.bench.timing import Ratio, ratio
from tools.page_blocks.sources import summary, table

_OPERATIONS = {
    "prefix_mean": "prefix mean",
    "gated_attention": "gated attention",
    "row_map_attention": "row map, relu^4",
    "score_stats": "score statistics",
    "selective_scan": "selective scan",
    "delta_rule": "delta rule",
}
_BASELINES = {
    "xla": "XLA",
    "cudnn": "cuDNN",
    "cudnn_width_512": "cuDNN, width 512",
    "reference": "naive XLA",
}


def kernel_checks(name: str) -> str:
    """Cases of each operation and the largest error as a share of its bound."""
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in summary(name)["rows"]:
        if not (row["green"] and row["repeats_itself"]):
            raise ValueError(f"{name}: {row['op']} {row['case']} does not agree with its reference")
        worst = max(share for _, share in row["deviations"].values())
        shares[row["op"]][row["implementation"]].append(worst)
    order = [op for op in _OPERATIONS if op in shares]
    return table(
        ("operation", "implementation", "cases", "largest error, as a share of its bound"),
        (
            (
                op,
                ", ".join(shares[op]),
                ", ".join(str(len(each)) for each in shares[op].values()),
                ", ".join(f"{max(each):.2f}" for each in shares[op].values()),
            )
            for op in order
        ),
    )


def kernel_times(name: str) -> str:
    """Time of each kernel and of its baseline, their ratio by turns, and the bar."""
    rows = [row for row in summary(name)["rows"] if not (row["missing"] or row["failed"])]
    return table(
        ("kernel", "case", "baseline", "ours", "the baseline", "times as fast", "bar"),
        (
            (
                f"{_OPERATIONS[row['op']]}, {row['what']}",
                f"`{row['case'].removesuffix('_bfloat16').replace('_bfloat16_', '_')}`",
                _BASELINES[row["baseline"]],
                _time(row["ours_seconds"]),
                _time(row["baseline_seconds"]),
                speed(row),
                _bar(row),
            )
            for row in rows
        ),
    )


def speed(row: dict[str, Any]) -> str:
    """The baseline's time over ours: the median of the turns and their range."""
    return _three_digits(ratio(row["baseline_seconds"], row["ours_seconds"]))


def _three_digits(value: Ratio) -> str:
    texts = [
        f"{each:.0f}" if each >= 100 else f"{each:.1f}" if each >= 10 else f"{each:.2f}"
        for each in (value.median, value.low, value.high)
    ]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def _time(seconds: list[float]) -> str:
    median = statistics.median(seconds)
    return f"{1e6 * median:,.0f} us" if median < 0.01 else f"{1e3 * median:.1f} ms"


def _bar(row: dict[str, Any]) -> str:
    if row.get("microseconds"):
        text, key = f"<= {row['microseconds']:g} us", "microseconds"
    elif row.get("time"):
        text, key = f"<= {row['time']:g} times as long", "time"
    else:
        text, key = f">= {row['speed']:g} times as fast", "speed"
    return f"{text}, {'reached' if row['reached'][key] else '**missed**'}"
