"""One run of pretraining, whose validation text has the sentences."""


def flags(request, folder):
    del folder
    return [f"--run={request.getfixturevalue('run')}"]
