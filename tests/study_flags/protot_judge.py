"""One run of pretraining: a model, its texts, and no opponent."""


def flags(request, folder):
    del folder
    return [f"--run={request.getfixturevalue('run')}"]
