"""Entry point of commands: flags, config, stop signals, exit codes.

A command module is a thin `main` and one line:

    def main(arguments: cli.Arguments) -> int | None:
        config = from_plain(arguments.config, AuditConfig)
        with open_workdir(arguments.workdir, arguments.config, resume=arguments.resume) as run:
            ...

    if __name__ == "__main__":
        cli.app(main, config="polyattn/smollm2", options=Options)

`iaj library command --config=library/x:mode --workdir=runs/x --config.model.width=12 --option=2`

1. parses the flags of every command, those of its own settings (`lm_jax.console.flags`), and the
   overrides of `ml_collections.config_flags`; what is left over is refused, because ml_collections
   ignores `config.lr=3` (no dashes) silently;
2. runs `main`; the first SIGINT, SIGTERM or SIGUSR1 only requests a stop (`lm_jax.run.stop`), so
   that a loop can save; a second SIGINT kills the process at once, even inside compiled code;
3. turns every `UserError` (lm_jax/errors.py) into one line on standard error, `error: what, where,
   what to do`, and its exit code. The traceback goes to the process's log, or with `--debug` (or
   LM_JAX_DEBUG set) to standard error. Where nobody reads the output any more, as after `| head`,
   the command ends without a word. Any other exception exits 1 and always leaves its traceback.

A config file is Python and runs: name only files you trust, never one out of a downloaded model.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
from pathlib import Path
import sys
import traceback
from typing import Any, NoReturn, TypedDict, TypeGuard, Unpack, cast

from absl import flags
from ml_collections import config_dict

from lm_jax.console import compilation, config_files, output
from lm_jax.console import flags as setting_flags
from lm_jax.console.config_files import load_config
from lm_jax.console.usage import entry, examples_first, field_meanings, missing_text
from lm_jax.errors import (
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    ElsewhereError,
    StoppedError,
    StorageError,
    UsageError,
    UserError,
    WorkdirInUseError,
    nearest,
)
from lm_jax.run import downloads, stop
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import STORAGE_ERRNOS, STORAGE_REMEDY
from lm_jax.run.settings import Settings, own_flags
from lm_jax.run.workdir import Resume, log_file
from lm_jax.train import profiling
from lm_jax.train.launch import DEFAULTS, LaunchOptions, launched_with

_EXIT_FAULT = 1
_COMMON_FLAGS = (
    *("config", "workdir", "resume", "profile", "compilation_cache", "download", "debug"),
    *("coordinator", "processes", "process"),
    *(field.name for field in dataclasses.fields(LaunchOptions)),
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Parsed command line: locked config, own options, work folder, how to resume in it.

    `config` is None for a command without one, `workdir`, which the settings may name, for one that
    may run without it and does, and `options` is the command's own dataclass, or None.
    `resume` is "auto", "force" or "never", as `open_workdir` takes it; `profile` the steps of
    a training command to trace; `compilation_cache` as `compilation.cache` takes it; `download`
    whether a model may be fetched from the Hugging Face hub; `launch` the options of training
    commands; `process` the index of this process among those of the run.
    """

    config: config_dict.ConfigDict | None
    workdir: Path | None
    options: Any = None
    resume: Resume = "auto"
    profile: profiling.Request | None = None
    compilation_cache: str | None = None
    download: bool = False
    launch: LaunchOptions = DEFAULTS
    process: int = 0

    @property
    def folder(self) -> Path:
        """The work folder of a command that requires one.

        Raises:
          UsageError: `--workdir` is missing.
        """
        if self.workdir is None:
            raise UsageError("--workdir is missing; name the folder that the run is to write")
        return self.workdir


Main = Callable[[Arguments], int | None]


class Command(TypedDict, total=False):
    """What a command takes on its command line.

    Attributes:
      config: default of `--config` (`name` or `name:mode`); without it the command has no
        `--config`.
      config_class: the dataclass that `main` builds from it, whose docstring the help quotes.
      options: dataclass whose fields are the command's own flags.
      workdir_required: whether it cannot run without a work folder, as is the default.
      distributed: whether it can be one of several processes (`processes.join`).
      training: whether it can trace some of its steps (`train.profiling`) and has the options of
        `train.launch`.
      doc: text that the help begins with; without it the docstring of `main`'s module.
    """

    config: str | None
    config_class: type | None
    options: type | None
    workdir_required: bool
    distributed: bool
    training: bool
    doc: str | None


def app(main: Main, **command: Unpack[Command]) -> NoReturn:
    """Runs `main` on the command line and exits the process with its exit code."""
    sys.exit(run(main, sys.argv, **command))


def run(main: Main, argv: Sequence[str], **command: Unpack[Command]) -> int:
    """Runs `main` on `argv` (program name first) and returns the exit code; raises nothing."""
    debug = "--debug" in argv or bool(os.environ.get("LM_JAX_DEBUG"))
    workdir = log = None
    try:
        doc = command.get("doc") or sys.modules[main.__module__].__doc__
        arguments = _parse(argv, command, doc)
        if arguments is None:
            return 0
        workdir = arguments.workdir
        log = workdir and workdir / log_file(arguments.process)
        compiled = compilation.cache(arguments.compilation_cache, by_source=bool(arguments.profile))
        traced = profiling.request(arguments.profile)
        fetching = downloads.allowed(arguments.download)
        launched = launched_with(arguments.launch)
        with stop.signals_as_requests(), compiled, traced, fetching, launched:
            code = main(arguments) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        # Their messages are complete, and the folder may belong to another run.
        if not isinstance(error, UsageError | WorkdirInUseError | ElsewhereError):
            _log_traceback(log)
        return _refuse(error, debug)
    except Exception as error:
        log = _log_traceback(log)
        if isinstance(error, BrokenPipeError) and output.reader_is_gone():
            return EXIT_UNREAD
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            place = error.filename or workdir or "an unnamed file"
            return _refuse(StorageError(f"{place}: {error.strerror}; {STORAGE_REMEDY}"), debug)
        if log is None or debug:
            traceback.print_exc()
        where = f"traceback in {log}" if log else "traceback above"
        text = f"{type(error).__name__}: {error}"
        print(f"error: {_one_line(text)[:500]}; {where}", file=sys.stderr)
        return _EXIT_FAULT


def _refuse(error: UserError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    head = "stopped" if isinstance(error, StoppedError) else "error"
    print(f"{head}: {_one_line(str(error))}", file=sys.stderr)
    return error.exit_code


def _one_line(text: str) -> str:
    # Terminal control characters in a file name or prompt must not reach the terminal.
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _log_traceback(log: Path | None) -> Path | None:
    """Appends the current exception to a log; returns its path, None if it is not there."""
    if not log or not log.is_file():
        return None
    try:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError:
        # The full disk is the reported error; the caller then prints the traceback.
        return None
    return log


def _parse(argv: Sequence[str], command: Command, doc: str | None) -> Arguments | None:
    """Parses in two passes, because the flags of the second depend on the config of the first."""
    default_config, config_class = command.get("config"), command.get("config_class")
    options = command.get("options")
    distributed, training = command.get("distributed"), command.get("training")
    own = flags.FlagValues()
    own.set_gnu_getopt(True)
    spec = None
    if default_config is not None:
        spec = flags.DEFINE_string(
            "config",
            default_config,
            "name of a config that comes with the packages, or path of a file; :mode after either",
            own,
        )
    workdir = flags.DEFINE_string(
        "workdir", None, "folder of this run; the same folder again resumes it", own
    )
    resume = flags.DEFINE_enum(
        "resume",
        "auto",
        ["auto", "force", "never"],
        "when to resume in a folder that holds a run: auto if the config is the same, force also "
        "if it differs, never: require a new folder",
        own,
    )
    if distributed:
        flags.DEFINE_string(
            "coordinator", None, "host:port of process 0 of several processes, or auto", own
        )
        flags.DEFINE_integer("processes", None, "number of processes", flag_values=own)
        flags.DEFINE_integer("process", None, "index of this process, from 0", flag_values=own)
    profile = None
    if training:
        profile = flags.DEFINE_string("profile", None, "steps to trace, FIRST:LAST", own)
        setting_flags.define_flags(LaunchOptions, own)
    cache = flags.DEFINE_string(
        "compilation_cache",
        None,
        "folder of compiled programs, or off for none; default a folder of the user's cache",
        own,
    )
    download = flags.DEFINE_boolean(
        "download", False, "fetch a model named ORG/NAME[@REVISION] that the hub's cache lacks", own
    )
    flags.DEFINE_boolean("debug", False, "print the traceback of every error", own)
    flags.DEFINE_boolean("help", False, "show this help", own, short_name="?")
    command_flags = _define_own(options, config_class, own)
    config = None
    try:
        rest = own(argv, known_only=True)
        config = None if spec is None else load_config(spec.value)
        if own["help"].value:
            print(_help(doc, own, command_flags, config, config_class), flush=True)
            return None
        if config is not None and _has_flags(config_class):
            setting_flags.apply_shortcuts(config_class, own, config)
        overridden = config_files.overridden(rest)
        rest = config_files.override(config, rest)
        if config is not None and _has_flags(config_class):
            setting_flags.apply(config_class, own, config, overridden)
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown(error.flagname, own, config, config_class)) from error
    # The last two come from an index that does not fit, as in `--config.names[9]=a`.
    except (flags.Error, ValueError, LookupError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UsageError(f"{error}; --help lists the flags") from error
    if len(rest) > 1:
        name = rest[1].lstrip("-").partition("=")[0]
        raise UsageError(f"{rest[1]!r} is not a flag; arguments are written --{name}=VALUE")
    if config is not None:
        to_plain(config)
    # grain reads a flag of absl's global table.
    flags.FLAGS.mark_as_parsed()
    missing = {}
    if options is not None:
        missing = setting_flags.missing_flags(options, own)
    elif config is not None and _has_flags(config_class):
        missing = setting_flags.missing_flags(config_class, own, config)
    required = command.get("workdir_required", True)
    if not workdir.value and (required or workdir.value is not None):
        missing["workdir"] = "the folder this run may write"
    if missing:
        raise UsageError(missing_text(missing, doc))
    chosen = None if options is None else setting_flags.read_options(options, own)
    folder = Path(workdir.value) if workdir.value else _default_folder(config, config_class)
    traced = None if profile is None else profiling.parse(profile.value)
    process = _join(own) if distributed else 0
    how = cast(Resume, resume.value)
    start = setting_flags.read_options(LaunchOptions, own) if training else DEFAULTS
    return Arguments(
        config, folder, chosen, how, traced, cache.value, download.value, start, process
    )


def _unknown(
    name: str,
    own: flags.FlagValues,
    config: config_dict.ConfigDict | None,
    config_class: type | None,
) -> str:
    with_flags = own_flags(config_class) if _has_flags(config_class) else {}
    if config is not None and name in config and name not in with_flags:
        return f"--{name} is not a flag of this command; write --config.{name}=VALUE"
    return f"--{name} is not a flag of this command{nearest(name, own)}"


def _default_folder(
    config: config_dict.ConfigDict | None, config_class: type | None
) -> Path | None:
    if config is None or config_class is None or not issubclass(config_class, Settings):
        return None
    return from_plain(config, config_class).default_folder()


def _has_flags(config_class: type | None) -> TypeGuard[type[Settings]]:
    return (
        config_class is not None
        and issubclass(config_class, Settings)
        and bool(own_flags(config_class) or config_class.shortcuts)
    )


def _define_own(
    options: type | None, config_class: type | None, own: flags.FlagValues
) -> list[flags.Flag]:
    """Defines the flags of a command's options, or of the settings that have flags of their own."""
    if _has_flags(config_class):
        return setting_flags.define_flags(config_class, own)
    return [] if options is None else setting_flags.define_flags(options, own)


def _join(own: flags.FlagValues) -> int:
    coordinator, count, index = (own[n].value for n in ("coordinator", "processes", "process"))
    if coordinator:
        # Imported here, because a command of one process may have no use for JAX.
        from lm_jax.run import processes

        return processes.join(coordinator, count, index)
    if (count, index) != (None, None):
        raise UsageError("--processes and --process need --coordinator, host:port of process 0")
    return 0


def _help(
    doc: str | None,
    own: flags.FlagValues,
    command_flags: Sequence[flags.Flag],
    config: config_dict.ConfigDict | None,
    config_class: type | None,
) -> str:
    lines = [examples_first(doc)]
    if command_flags:
        described = setting_flags.help_lines(command_flags, _defaults(config, config_class))
        lines += ["", "Options of this command:", *described]
    common_flags = [own[name] for name in _COMMON_FLAGS if name in own]
    lines += ["", "Options of every command:", *setting_flags.help_lines(common_flags)]
    if config is not None:
        meanings = {} if config_class is None else field_meanings(config_class)
        with_flags = own_flags(config_class) if _has_flags(config_class) else {}
        described = [
            line
            for name, value in config_files.fields(config)
            if name not in with_flags
            for line in entry(f"  --config.{name}={_show(value)}", meanings.get(name, ""))
        ]
        lines += ["", f"Fields of {own['config'].value}:", *described] if described else []
    return "\n".join(lines)


def _defaults(config: config_dict.ConfigDict | None, config_class: type | None) -> dict[str, Any]:
    """What the config file says of the fields that have flags, by the name of the flag."""
    if config is None or not _has_flags(config_class):
        return {}
    # A config file may leave out what has a default.
    said = {
        name: config.get(name, getattr(config_class, name, None))
        for name in own_flags(config_class)
    }
    return {
        flag.name or name: said[name]
        for name, flag in own_flags(config_class).items()
        if said[name] or not flag.required
    }


def _show(value: Any) -> str:
    if isinstance(value, config_dict.FieldReference):
        return f"<{value.get_type().__name__}>"
    return repr(value)
