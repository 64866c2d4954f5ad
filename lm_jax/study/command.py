"""A study as a command: `iaj LIBRARY NAME --config=... --workdir=...`."""

from collections.abc import Sequence
import sys

from lm_jax.console import cli
from lm_jax.run.settings import Settings
from lm_jax.study import frame
from lm_jax.study.declaration import Distributed, Study, Training


def run(study: Study, argv: Sequence[str]) -> int:
    """Runs a study on the arguments (program name first) and returns the exit code.

    The docstring of the study's package is its help, which begins with examples.
    """

    def main(arguments: cli.Arguments) -> int:
        found = frame.answer(study, arguments.config, arguments.folder, resume=arguments.resume)
        return found.exit_code

    package = study.config.__module__.rpartition(".")[0]
    return cli.run(
        main,
        argv,
        config=study.config_name,
        config_class=study.config,
        workdir_required=study.config.default_folder is Settings.default_folder,
        distributed=issubclass(study.config, Distributed),
        training=issubclass(study.config, Training),
        doc=sys.modules[package].__doc__,
    )
