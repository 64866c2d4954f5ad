"""Flags that belong to a kind of command, over all commands of the libraries."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
import re
import shlex
import sys
import tomllib

import pytest

from iaj import commands as front
from lm_jax.assets.manifest import entries
from lm_jax.console import cli, config_files, usage
from lm_jax.run.config import to_plain
from lm_jax.run.files import read_json
from lm_jax.run.settings import Settings, own_flags
from lm_jax.study import Distributed, Training, frame

ROOT = Path(__file__).parents[1]
LIBRARIES = ("lm_jax", "polyattn_jax", "protot_jax", "sparse_jax")
TRAINING = {
    "polyattn distill",
    "polyattn rankings",
    "protot glue",
    "protot pretrain",
    "protot recall",
    "protot search",
    "protot study",
    "sparse addition",
    "sparse pair",
    "sparse posttrain",
    "sparse transcoder",
}
# Commands that train no model.
OTHERS = {
    "polyattn audit",
    "polyattn bench",
    "polyattn check",
    "polyattn haystack",
    "polyattn paper",
    "protot graph",
    "protot concepts",
    "protot scores",
    "protot count",
    "protot export",
    "protot generate",
    "protot intervene",
    "protot robustness",
    "protot perturb",
    "protot judge",
    "protot subset",
    "sparse circuits",
    "sparse graph",
    "sparse choices",
    "sparse heads",
    "sparse lens",
    "sparse two_hop",
}


@pytest.fixture(autouse=True)
def shortcuts(monkeypatch):
    """Flags that set several fields, without the folders that examples name."""
    for module in STUDIES:
        cls = importlib.import_module(module).STUDY.config
        made = {
            name: dataclasses.replace(each, fields=lambda _: {})
            for name, each in cls.shortcuts.items()
        }
        if made:
            monkeypatch.setattr(cls, "shortcuts", made)


def commands():
    """Every module that is a command: its file's, and the keywords (`ast`) of its `cli.app`."""
    results = {}
    for library in LIBRARIES:
        for file in (ROOT / library).rglob("*.py"):
            for node in ast.parse(file.read_text("utf-8")).body:
                if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
                    continue
                (call,) = (each.value for each in node.body)
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                options = {each.arg: each.value for each in call.keywords}
                results[module.removesuffix(".__main__")] = (module, options)
    return results


STUDIES = [module for module in front.COMMANDS.values() if front.is_study(module)]
MODULES = commands() | {module: (module, {}) for module in STUDIES}
# The module of each command of the libraries, by its words.
COMMANDS = {
    " ".join(words): module
    for words, module in front.COMMANDS.items()
    if not module.startswith("iaj.")
}


def loaded(name):
    """The main of a command, and the keywords with which it calls `cli.app`."""
    file, keywords = MODULES[COMMANDS[name]]
    module = importlib.import_module(file)
    if file in STUDIES:
        return declared(module.STUDY, file)
    options = {
        key: getattr(module, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)
        for key, value in keywords.items()
    }
    return module.main, options


def declared(study, package):
    """The same of a study, whose package has the help."""

    def main(arguments):
        frame.execute(study, arguments.config, arguments.folder, resume=arguments.resume)

    main.__module__ = package
    return main, {
        "config": study.config_name,
        "config_class": study.config,
        "workdir_required": study.config.default_folder is Settings.default_folder,
        "distributed": issubclass(study.config, Distributed),
        "training": issubclass(study.config, Training),
    }


def flag_fields(options):
    """The fields of a command that have flags of their own, and whether each is required."""
    cls = options.get("options") or options.get("config_class")
    if cls is None or not issubclass(cls, Settings):
        return {}
    needed = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return {name: flag.required or name in needed for name, flag in own_flags(cls).items()}


def required_options(options):
    return [name for name, required in flag_fields(options).items() if required]


def test_every_command_is_known_here():
    """So that a new one is put among those that train or the others."""
    assert COMMANDS.keys() == TRAINING | OTHERS
    # And each has words of its own.
    assert MODULES.keys() == set(COMMANDS.values())


@pytest.mark.parametrize("name", sorted(TRAINING | OTHERS))
def test_training_commands_and_no_others_take_a_range_of_steps_to_trace(name, tmp_path, capsys):
    main, options = loaded(name)
    # A range that cannot be, so that nothing is started.
    argv = [name, f"--workdir={tmp_path / 'run'}", "--profile=2:1"]
    argv += [f"--{needed}=x" for needed in required_options(options)]
    assert cli.run(main, argv, **options) == 2
    wanted = "--profile=2:1 is not FIRST:LAST" if name in TRAINING else "--profile is not a flag"
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_guide_to_traces_names_every_training_command():
    guide = (ROOT / "docs" / "profiling.md").read_text("utf-8")
    assert {words for words in COMMANDS if f"`iaj {words}`" in guide} == TRAINING


@pytest.mark.parametrize("words", front.COMMANDS, ids=" ".join)
def test_help_opens_with_two_examples_of_this_command(words, capsys):
    module = front.COMMANDS[words]
    if module in MODULES:
        main, options = loaded(" ".join(words))
        assert cli.run(main, ["iaj", "--help"], **options) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(module).main(["--help"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "Examples:"
    examples = "\n".join(lines[: lines.index("")]).replace("\\\n", " ").splitlines()
    own = [shlex.split(line) for line in examples if line.split()[0] == "iaj"]
    assert len([line for line in own if tuple(line[1 : 1 + len(words)]) == words]) >= 2


@pytest.mark.parametrize("name", sorted(TRAINING | OTHERS))
def test_the_flags_of_the_examples_are_flags_of_the_command(name, capsys):
    """Of options, of the config, and of every command; values of options are of their types."""
    main, options = loaded(name)
    seen = []
    doc = inspect.getdoc(sys.modules[main.__module__]).replace("\\\n", " ")
    examples = [line.split("iaj ", 1)[1] for line in doc.splitlines() if line[:8] == "    iaj "]
    for example in examples:
        _, _, *flags = shlex.split(example)
        argv = [name, *flags, *["--workdir=run"] * ("--workdir" not in example)]

        def parsed(arguments):
            seen.append(arguments)

        parsed.__module__ = main.__module__
        assert cli.run(parsed, argv, **options) == 0, capsys.readouterr().err
    assert len(seen) == len(examples) >= 2


@pytest.mark.parametrize("name", sorted(TRAINING | OTHERS))
def test_every_option_has_a_meaning_in_words(name):
    _, options = loaded(name)
    cls = options.get("options") or options.get("config_class")
    for field, required in flag_fields(options).items():
        text = usage.field_meanings(cls)[field]
        assert len(text.split()) >= 2
        assert not text.startswith(("of ", "a number", "the number"))
        # The error for a missing flag asks to "name the" text.
        assert not (required and text.startswith(("a ", "an ", "the ")))


# Words with which a phrase opens that lacks what it is about.
NO_NOUN = {"as", "before", "by", "in", "its", "of", "on", "that", "their", "to"}


@pytest.mark.parametrize("name", sorted(TRAINING | OTHERS))
def test_help_says_what_each_field_of_the_config_means(name, capsys):
    main, options = loaded(name)
    if "config" not in options:
        return
    meanings = usage.field_meanings(options["config_class"])
    config = config_files.load_config(options["config"])
    fields = {field for field, _ in config_files.fields(config)}
    assert fields <= meanings.keys()
    by_section = {}
    for field in fields:
        words = meanings[field].split()
        # A phrase that can be read without the docstring around it,
        assert len(words) >= 3 and words[0] not in NO_NOUN, field
        assert not meanings[field].startswith(("a name of `", "names of `")), field
        # and that no other field of the same section has.
        section = field.rpartition(".")[0]
        assert by_section.setdefault((section, meanings[field]), field) == field, field
    assert cli.run(main, [name, "--help"], **options) == 0
    shown = " ".join(capsys.readouterr().out.split())
    cls = options["config_class"]
    own = own_flags(cls) if issubclass(cls, Settings) else {}
    for field in fields:
        # A field that has a flag is listed as that.
        name = (own[field].name or field) if field in own else f"config.{field}"
        assert f"--{name}=" in shown or f"--[no]{name} " in shown
        assert " ".join(meanings[field].split()).removesuffix(".") in shown


def test_the_page_of_commands_lists_each_with_configs_that_are_there():
    page = ROOT / "docs" / "reference" / "commands.md"
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line[:4] == "iaj "]
    named = {
        words for words in front.COMMANDS for line in lines if (*line[1:],)[: len(words)] == words
    }
    assert named == front.COMMANDS.keys()
    configs = [
        word.removeprefix("--config=") for line in lines for word in line if "--config=" in word
    ]
    assert configs
    assert set(configs) <= set(config_files.shipped_names())


def command_lines(text):
    """Commands of this distribution in the blocks of a document, without comments."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines() if language != "python" else ():
            line = line.removeprefix("$ ")
            if line.startswith(("iaj ", "python -m ")):
                yield shlex.split(line, comments=True)


def assert_is_a_command(line, capsys):
    """The words of a command name one, with flags of its own; returns its parsed arguments.

    None for commands without a config, whose flags are looked up in their source.
    """
    modules = front.COMMANDS
    if line[0] == "iaj":
        words = max((w for w in modules if (*line[1:],)[: len(w)] == w), key=len, default=None)
        assert words or line[1].startswith("-"), line
        module, flags = modules.get(words), line[1 + len(words or ()) :]
    else:
        module, flags = line[2], line[3:]
    if module in MODULES:
        main, options = loaded(" ".join(words))
        flags += ["--workdir=run"] * (not any("--workdir" in flag for flag in flags))
        # Refused where no step of it was run.
        flags = [flag for flag in flags if not flag.startswith("--profile=")]
        seen = []

        def parsed(arguments):
            seen.append(arguments)

        parsed.__module__ = main.__module__
        result = cli.run(parsed, [module, *flags], **options)
        assert result == 0, (line, capsys.readouterr().err)
        return seen[0] if seen else None
    if module is not None and module.split(".")[0] in ("tools", "iaj"):
        # Some flags are those of a helper that several of them share.
        files = front.source_file(module).parent.rglob("*.py")
        source = "".join(file.read_text("utf-8") for file in files)
        for flag in flags:
            name = flag.split("=")[0]
            assert not name.startswith("--") or name in source, (line, name)
    return None


RESULTS = [
    file
    for file in (ROOT / "results").rglob("result.toml")
    if "\ncommand = " in file.read_text("utf-8")
]


@pytest.mark.parametrize("file", sorted(RESULTS), ids=lambda file: "/".join(file.parts[-3:-1]))
def test_a_stored_result_is_reproduced_by_a_command_that_is_there(file, monkeypatch, capsys):
    # Folders that these commands name are those of the repository.
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    command = tomllib.loads(file.read_text("utf-8"))["reproduce"]["command"]
    arguments = assert_is_a_command(shlex.split(command.replace("{workdir}", "run")), capsys)
    stored = file.parent / "summary.json"
    settings = read_json(stored).get("config", {}) if stored.is_file() else {}
    # And by the settings that it was made with, also where those of a mode are others now.
    config = to_plain(arguments.config) if settings else {}
    assert {name: config[name] for name in settings} == settings


DOCUMENTS = ["AGENTS.md", "README.md", "CONTRIBUTING.md", "models/README.md", "recipes/README.md"]
DOCUMENTS += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_are_there_with_their_flags(document, capsys):
    for line in command_lines((ROOT / document).read_text("utf-8")):
        assert_is_a_command(line, capsys)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "howto").glob("*.md")), ids=lambda p: p.stem
)
def test_a_how_to_fetches_the_texts_that_its_commands_read(page, capsys):
    """The corpora of the manifest that are read unless a flag names another."""
    fetched = set()
    for line in command_lines(page.read_text("utf-8")):
        if line[:2] == ["iaj", "fetch"]:
            fetched.update(line[2:])
        arguments = assert_is_a_command(line, capsys)
        config = getattr(arguments, "config", None) or {}
        source = config["corpus"]["source"] if "corpus" in config else ""
        assert source in fetched | {""} or source not in entries(), line
