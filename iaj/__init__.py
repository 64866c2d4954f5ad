"""The command `iaj`: entry point of the commands of the three libraries and of tools for users.

    __main__     finds the module of a command and runs it, as `python -m MODULE` would
    early        what is refused before JAX is imported
    commands     the table of commands, and their help
    completion   of commands, flags and config names, in bash and zsh
    parser       argument parser of the commands with positional arguments
    fetch        downloads pretrained weights and corpora into the cache
    convert      converts a model to an orbax checkpoint
    quickstart   the first run of a new user
    doctor       installed versions, devices, cache, and missing optional packages

Only this command, tools and tests import these modules.
"""
