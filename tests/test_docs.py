"""The documents say what the code does: names, schemas, links, and their Python runs."""

import ast
import importlib
import importlib.util
from pathlib import Path
import re
import shlex

import pytest
import yaml

from iaj_kernels.suites import SUITES
from lm_jax import errors
from lm_jax.console import config_files
from lm_jax.run.config import config_difference, from_plain, to_plain
from polyattn_jax.audit import schema
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.studies.paper.items import ITEMS
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.training.config import PretrainConfig
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from tools.page_blocks.ledger import our_value

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
DOCUMENTS = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "models/README.md",
    "recipes/README.md",
    *(f"docs/{page}" for page in PAGES),
]


def documented_columns(heading: str) -> list[str]:
    text = (DOCS / "polyattn" / "files.md").read_text("utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| ([a-z0-9_, ]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in cell.split(", ") if name != "column"]


def test_documented_columns_of_rows():
    assert documented_columns("rows.parquet") == ["model", *schema.ROWS.names, "head_type"]


def test_documented_columns_of_answers():
    assert documented_columns("answers.parquet") == ["model", *schema.ANSWERS.names]


@pytest.mark.real("smollm2")
def test_python_of_the_readme_runs():
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    run, said = names["run"], block
    # What stands beside a line is what it gives.
    assert (
        f"# {run!r}" in said and f"# {names['without'].logit_diff(' Paris', ' London'):.2f}" in said
    )
    assert repr(run.attribution(" Paris", " London")).split(", L29H1")[0] in said
    lens = [top[0][0] for top in run.logit_lens()]
    assert ", ".join(map(repr, lens[-3:])) in said
    assert f"# {run.cache['attn.pattern'].shape}" in said


OURS = r"(?:lm_jax|protot_jax|sparse_jax|polyattn_jax|iaj_kernels|tools|iaj)"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_module_function_and_file_that_a_document_names_is_there(document):
    # Targets of links are from the folder of the document; another test follows them.
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / document).read_text("utf-8"))
    for name in sorted(set(re.findall(rf"(?<![\w/-]){OURS}(?!\.md\b)(?:\.[A-Za-z_]\w*)+", text))):
        assert exists(name), f"{document} names {name}"
    folders = rf"(?:{OURS}|kernels|configs|tests|docs)"
    files = rf"(?<![\w/]){folders}/[\w/.-]+\.(?:py|md|json|jsonl|toml|css)\b"
    # What a result says of a file at the commit that it was measured at.
    files += r"(?! of [0-9a-f]{7}\b)"
    for name in sorted(set(re.findall(files, text))):
        assert (ROOT / name).exists(), f"{document} names {name}"


def test_every_mode_of_a_config_that_a_document_names_is_one():
    text = "\n".join((ROOT / document).read_text("utf-8") for document in DOCUMENTS)
    names = set(re.findall(r"(?<![\w/])(?:polyattn|protot|sparse)/\w+:\w+", text))
    assert "sparse/smollm2:over_dense" in names
    for name in sorted(names):
        config_files.load_config(name)


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or a member of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            # What stands before the last dot is no package.
            continue
        if spec is None:
            continue
        member = importlib.import_module(module)
        for part in parts[length:]:
            if not hasattr(member, part):
                return False
            member = getattr(member, part)
        return True
    return False


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


MOST_WORDS = 1_500
MOST_LINES = {"README.md": 150, "AGENTS.md": 80}


def words(text: str) -> int:
    """Words that a reader of a page reads: those of its prose and of its tables.

    Not counted are blocks of code, comments (the source of a rendered block), settings at the top
    of a page, and what has neither a letter nor a digit, such as the bars of a table.
    """
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", prose(text), flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_words_are_those_of_prose_and_tables():
    page = "---\nhide: toc\n---\n# Two words\n\n| a | 1.5 ms |\n| --- | --- |\n"
    assert words(f"{page}<!-- not these -->\n```\nnor these\n```\n") == 5


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_enough_to_be_read(page):
    assert words((DOCS / page).read_text("utf-8")) <= MOST_WORDS


@pytest.mark.parametrize("document", MOST_LINES)
def test_the_first_documents_are_short(document):
    lines = (ROOT / document).read_text("utf-8").splitlines()
    assert len(lines) <= MOST_LINES[document]
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_every_link_to_a_file_leads_to_one(document):
    """Anchors are checked by the strict build of the site."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose((ROOT / document).read_text("utf-8")))
    missing = [
        target
        for target in targets
        if "://" not in target and not (ROOT / document).parent.joinpath(target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_extras_are_quoted_for_shells_that_read_brackets_as_a_pattern(document):
    assert not re.search(r"pip install (?:-e )?[\w.-]*\[", (ROOT / document).read_text("utf-8"))


def leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(part)
    ]


def test_every_page_is_once_in_the_navigation_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    assert sorted(leaves(nav)) == PAGES


RUNNING = ["index.md", "reference/errors.md", *(page for page in PAGES if page[:6] == "howto/")]


@pytest.mark.parametrize("page", RUNNING)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in order, in a folder that has the models of this repository."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize(
    "package",
    [
        *("lm_jax", "polyattn_jax", "protot_jax", "iaj_kernels"),
        *("sparse_jax", "sparse_jax.circuits", "sparse_jax.transcoders", "sparse_jax.graphs"),
    ],
)
def test_the_reference_has_every_public_name(package):
    text = (DOCS / "reference" / f"{package.split('.')[0].removeprefix('iaj_')}.md").read_text(
        "utf-8"
    )
    listed = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    assert all(exists(name) for name in listed)
    if package == "iaj_kernels":
        wanted = {f"iaj_kernels.{op}.api.{op}" for op in SUITES}
    else:
        wanted = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    # A module, such as `lm_jax.params`, by what is in it.
    assert {
        name for name in wanted if not any(f"{each}.".startswith(f"{name}.") for each in listed)
    } == set()


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, its first line and rule left out."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i - 1 for i, row in enumerate(rows) if set(row) <= set("|- ")}
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for i, row in enumerate(rows)
        if i not in heads and i - 1 not in heads
    ]


def test_the_page_of_exit_codes_has_every_error_with_its_code():
    rows = table_rows((DOCS / "reference" / "errors.md").read_text("utf-8"))
    listed = {row[2].strip("`"): int(row[0]) for row in rows if row[2].startswith("`")}
    assert listed == {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.UserError) and kind.exit_code != 1
    }
    codes = {int(row[0]) for row in rows}
    assert {errors.EXIT_FINISHED, errors.EXIT_NO_GO, errors.EXIT_UNDECIDED} <= codes


def ledger(page: str) -> str:
    """A page of the claims: `index` or the name of a paper in `published`."""
    return (DOCS / "claims" / f"{page}.md").read_text("utf-8")


STATES = {row[0] for row in table_rows(ledger("index"))}


def items(text: str) -> list[str]:
    """Names of the rows of a page, "Figures 4 to 6" as three."""
    names = []
    for name, *_ in table_rows(text):
        if match := re.fullmatch(r"Figures (\d+) to (\d+)", name):
            names += [f"Figure {i}" for i in range(int(match[1]), int(match[2]) + 1)]
        else:
            names.append(name)
    return names


@pytest.mark.parametrize(
    ("paper", "wanted"),
    [
        ("polyattn", [item.name for item in ITEMS]),
        ("sparse", [f"Table {i}" for i in range(1, 4)] + [f"Figure {i}" for i in range(1, 18)]),
        ("protot", [f"Table {i}" for i in range(1, 23)] + [f"Figure {i}" for i in range(1, 26)]),
    ],
    ids=["polyattn", "sparse", "protot"],
)
def test_the_ledger_has_every_table_and_figure_of_a_paper(paper, wanted):
    text = ledger(paper)
    assert items(text) == wanted
    for name, *_, ours, _, state in table_rows(text):
        parts = set(re.split(r" \(\w+\)(?:, )?", state))
        assert parts <= {*STATES, ""}, name
        # A value of ours, or the item that has it, where something was measured, and only there.
        if parts & {"measured", "in small"}:
            assert re.search(r"\d", ours), name
        elif state != "no number":
            assert ours == "–", name


@pytest.mark.parametrize(
    "claim",
    [
        {"ours": "3.1 nats", "state": "in small"},
        {"ours": "3.1 nats", "state": "in its report"},
        {"ours": "–", "state": "measured"},
    ],
)
def test_a_number_of_the_ledger_has_a_result_that_it_is_from(claim):
    with pytest.raises(ValueError, match="Table 1 has a value of ours without `results`"):
        our_value({"item": "Table 1", **claim})
    assert our_value({"item": "Table 1", "ours": "as Table 2", "state": "in small"}) == "as Table 2"


def templates(file: Path) -> list[str]:
    """The strings of a file, with three dots for every value that is put in."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return [
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]


def test_the_messages_of_the_questions_are_messages_of_the_code():
    section = (DOCS / "faq.md").read_text("utf-8").split("## Messages")[1].split("\n## ")[0]
    messages = re.findall(r"^\*\*`(.*?)`\*\*", section, re.MULTILINE)
    assert messages
    known = [text for file in sorted((ROOT / "lm_jax").rglob("*.py")) for text in templates(file)]
    for message in messages:
        parts = map(re.escape, re.split(r"'?\.\.\.'?", message))
        pattern = re.compile(r"'?\.\.\.'?".join(parts))
        assert any(pattern.search(text) for text in known), message


CONFIGS = {
    "protot/default": PretrainConfig,
    "protot/glue": GlueConfig,
    "sparse/smollm2": PosttrainConfig,
    "polyattn/smollm2": AuditConfig,
}
CHOICES = re.findall(
    r"^\| `([a-z0-9_/]+)` \| `(.+?)` \| `(.+?)` \|",
    (DOCS / "choices.md").read_text("utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("name", "switch", "default"), CHOICES)
def test_a_switch_is_accepted_and_is_not_what_the_config_has(name, switch, default):
    config = config_files.load_config(name)
    before = to_plain(config)
    assert config_files.override(config, ["command", *shlex.split(switch)]) == ["command"]
    field = switch.split("=")[0].removeprefix("--config.")
    assert config_difference(before, to_plain(config)), f"{name} has {switch} already"
    value = dict(config_files.fields(config_files.load_config(name)))[field]
    assert repr(value) == default
    from_plain(config, CONFIGS[name])


def test_every_table_of_choices_is_read():
    assert {name for name, _, _ in CHOICES} == set(CONFIGS) and len(CHOICES) >= 25
