"""A model that finds needles, and as many of them as show that a recipe preserves (exit code 0)."""


def flags(request, folder):
    names = {"model": "tiny_with_head", "haystack": "haystack"}
    made = {name: request.getfixturevalue(fixture) for name, fixture in names.items()}
    return [
        *(f"--{name}={path}" for name, path in made.items()),
        *("--n=73", "--length=24", "--batch_size=73", "--recipe=relu:p=4,b=1"),
    ]
