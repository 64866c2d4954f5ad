"""A model that finds needles."""


def flags(request, folder):
    del folder
    return [f"--config.model={request.getfixturevalue('tiny_with_head')}"]
