"""The command `iaj`: one front for the commands of the three libraries, and the tools of a user.

    __main__     finds the module of a command and runs it, as `python -m MODULE` would
    commands     the table of commands, and their help
    completion   of commands, flags and config names, in bash and zsh
    parser       of the commands that take positional arguments
    fetch        real weights and corpora into the cache
    convert      a model to an orbax checkpoint
    quickstart   the first run of a new user
    doctor       what is installed here, and what is missing for what

Nothing imports these modules but this command, tools and tests.
"""
