"""A run of pretraining of four steps, and a beginning in its words."""


def flags(request, folder):
    del folder
    return [f"--run={request.getfixturevalue('run')}", "--prompt=the house of a river and its"]
