"""A model that finds needles, and a text around them."""


def flags(request, folder):
    names = {"model": "tiny_with_head", "haystack": "haystack"}
    made = {name: request.getfixturevalue(fixture) for name, fixture in names.items()}
    return [
        *(f"--config.{name}={path}" for name, path in made.items()),
        "--config.niah_lengths=(24,)",
        "--config.sweep_length=24",
        "--config.ablation_heads=(1,)",
        "--config.batch_size=2",
    ]
