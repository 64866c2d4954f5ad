"""Draws the figures of `docs/` from `results/`: `python -m tools.pictures.figures`.

A figure is one self-contained SVG file, which Markdown pages show as an image in both the light and
the dark scheme.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_jax.report import theme
from lm_jax.report.layers import DASHES
from lm_jax.run.files import write_bytes

if TYPE_CHECKING:
    import altair as alt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECAY_ERROR = ROOT / "results" / "arithmetic" / "released_decay_error" / "summary.json"
# Errors below this are drawn here: float32 holds 1 to within 6e-8, and zero has no logarithm.
SMALLEST = 1e-8
WIDTH, HEIGHT = 460, 290
ARITHMETIC = ("ours", "released")
# One of the fonts in vl-convert, so that the text has the same layout on every machine.
FONT = "Roboto"


def decay_error(data: Mapping[str, Any]) -> "alt.HConcatChart":
    """Arithmetic of the prefix mean in the released code against ours.

    Left: relative error of the discount over one half-life. Right: mean of values that are all 1.
    Both are by position in half-lives. Curves are interrupted where the released arithmetic gives
    weight 0 to every write.
    """
    import altair as alt

    rows = [
        {
            "arithmetic": name,
            "half-life": f"{half_life:g}",
            "half-lives into the sequence": position,
            "discount error": max(abs(error), SMALLEST) if error is not None else None,
            "mean of ones": mean,
        }
        for name in ARITHMETIC
        for half_life, curve in zip(data["half_lives"], data["curves"][name], strict=True)
        for position, error, mean in zip(
            data["position_in_half_lives"],
            curve["discount_error"],
            curve["mean_of_ones"],
            strict=True,
        )
    ]
    lengths = [f"{each:g}" for each in data["half_lives"]]
    dashes = alt.Scale(domain=lengths, range=list(DASHES[: len(lengths)]))
    colours = alt.Scale(domain=list(ARITHMETIC))
    wide = alt.Legend(symbolSize=500)
    base = (
        alt.Chart()
        .mark_line(style="curve")
        .encode(
            alt.X("half-lives into the sequence:Q", axis=alt.Axis(tickCount=6)),
            alt.Color("arithmetic:N", scale=colours, legend=wide),
            alt.StrokeDash("half-life:N", scale=dashes, legend=wide),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
    log = alt.Scale(type="log", domain=[SMALLEST / 2, 3.0], nice=False)
    linear = alt.Scale(domain=[-0.03, 1.08], nice=False)
    few = alt.Axis(tickCount=5)
    chart = alt.hconcat(
        base.encode(alt.Y("discount error:Q", title="", scale=log, axis=few)).properties(
            title="Relative error of the discount over one half-life"
        ),
        base.encode(alt.Y("mean of ones:Q", title="", scale=linear, axis=few)).properties(
            title="Mean of values that are all 1"
        ),
        data=alt.Data(values=rows),
        description="Error of the discount and mean of ones, released arithmetic and ours",
    )
    config = theme.vega_config(theme.LIGHT)
    chart.config = alt.Config.from_dict(_with_font(config))
    return chart


def svg(chart: "alt.HConcatChart") -> str:
    """SVG text of a chart."""
    import vl_convert

    text = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version="v6.4")
    return text.replace(f'"{FONT}"', f'"{FONT}, sans-serif"')


def _with_font(config: Any) -> Any:
    """The config with `FONT` as every font."""
    if not isinstance(config, dict):
        return config
    fonts = {name: FONT for name in config if name.lower().endswith("font")}
    return {name: _with_font(value) for name, value in config.items()} | fonts


def main() -> None:
    """The command."""
    data = json.loads(DECAY_ERROR.read_text("utf-8"))
    path = DOCS / "figures" / "released_decay_error.svg"
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, f"{svg(decay_error(data))}\n".encode())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
