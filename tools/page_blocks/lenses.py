"""Tables of lenses: `iaj sparse lens`."""

from tools.page_blocks.sources import summary, table


def lenses(name: str, every: int = 1) -> str:
    """How often each lens' most probable token is the model's, and its divergence, by layer.

    Args:
      name: a stored result.
      every: layers from one row to the next; the last is always shown.
    """
    found = summary(name)
    layers = found["layers"]
    rows = [
        (
            str(each["layer"]),
            *(f"{100 * share:.1f} %" for share in each["agreeing"].values()),
            *(f"{nats:.2f}" for nats in each["divergence"].values()),
            "–" if each["spread"] is None else f"{each['spread']:.3f}",
        )
        for at, each in enumerate(layers)
        if at % every == 0 or at == len(layers) - 1
    ]
    names = [*layers[0]["agreeing"]]
    heads = ["layer", *(f"the model's token, {lens}" for lens in names)]
    return table((*heads, *(f"nats, {lens}" for lens in names), "standard error of J"), rows)
