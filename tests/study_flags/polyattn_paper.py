"""A model that finds needles, and a text around them."""


def flags(request, folder):
    return [
        f"--models={request.getfixturevalue('tiny_with_head')}",
        f"--config.haystack={request.getfixturevalue('haystack')}",
        "--config.suites=('two_needles',)",
        "--config.suite_lengths=(64,)",
        "--config.recipes=('relu_p4_bauto',)",
        "--config.batch_size=2",
        "--config.single_heads=0",
    ]
