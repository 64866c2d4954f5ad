"""A study as a command: `iaj LIBRARY NAME --config=... --workdir=...`."""

from collections.abc import Sequence
import sys

from lm_jax.run import cli
from lm_jax.study import frame
from lm_jax.study.declaration import Distributed, Study, Training


def run(study: Study, argv: Sequence[str]) -> int:
    """Runs a study on the arguments (program name first) and returns the exit code.

    The docstring of the study's package is its help, which begins with examples.
    """

    def main(arguments: cli.Arguments) -> None:
        frame.execute(study, arguments.config, arguments.folder, resume=arguments.resume)

    package = study.config.__module__.rpartition(".")[0]
    return cli.run(
        main,
        argv,
        config=study.config_name,
        config_class=study.config,
        distributed=issubclass(study.config, Distributed),
        training=issubclass(study.config, Training),
        doc=sys.modules[package].__doc__,
    )
