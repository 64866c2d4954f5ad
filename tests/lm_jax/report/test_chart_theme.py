"""Charts outside of a page have the light theme, each its own copy."""

from lm_jax import report
from lm_jax.report import theme


def test_a_change_to_the_theme_of_a_chart_is_of_this_chart_alone():
    first, second = (
        report.bars([report.Bar("a", 1.0)], caption="c", x_label="x") for _ in range(2)
    )
    first.config.background = "red"
    first.config.view.stroke = "red"
    assert first.to_dict()["config"]["background"] == "red"
    light, result = theme.vega_config(theme.LIGHT), second.to_dict()["config"]
    # Altair adds a size that no chart takes.
    result["view"] = {name: result["view"][name] for name in light["view"]}
    assert result == light
