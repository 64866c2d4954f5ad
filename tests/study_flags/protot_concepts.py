"""A run of pretraining of four steps."""


def flags(request, folder):
    del folder
    return [f"--run={request.getfixturevalue('run')}"]
