"""The command from a run to its page, its numbers, and what it refuses."""

import contextlib
import copy
import io
import json
import re

import numpy as np
import pytest

from lm_jax.report import figure
from lm_jax.report.markup import number
from lm_jax.run.results import parse_result
from lm_jax.study import command, frame
import protot_jax
from protot_jax.studies.attribution import STUDY, attribute, prompt_tokens, report
from protot_jax.studies.attribution.results import AttributionReport
from tests.browser import without_scripts

PROMPT = "the house of a river and its"
FLAGS = (f"--prompt={PROMPT}", "--targets=town,people", "--pairs=7")


def launched(*flags):
    return command.run(STUDY, ["iaj protot graph", *flags])


@pytest.fixture(scope="module")
def attributed(run):
    """What the command wrote into the run, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert launched(f"--run={run}", *FLAGS) == 0
    (folder,) = (run / "attribution").iterdir()
    content = json.loads((folder / frame.SUMMARY).read_text("utf-8"))
    return folder, content, printed.getvalue()


def test_the_targets_and_their_greatest_part_are_printed(attributed):
    _, content, printed = attributed
    assert [each["token"]["text"] for each in content["targets"]] == ["town", "people"]
    assert [each["text"] for each in content["tokens"]][-7:] == PROMPT.split()
    counted = content["targets"][0]
    first = counted["pairs"][0]
    assert f"L{first['layer']}P{first['prototype']}" in printed
    assert f"{first['share']:+.4f}" in printed and report.PART in printed
    assert (
        f"{counted['pairs_for_90_percent']:,} of {counted['entries']:,} pairs have 90 % of the sum "
        "of all absolute parts"
    ) in printed


def test_the_answer_names_prompt_target_and_the_prototype_with_the_largest_part(attributed):
    _, content, printed = attributed
    first = printed.strip().splitlines()[0]
    target = content["targets"][0]
    size_LP = np.abs(target["through"]["prototypes"])
    layer, prototype = np.unravel_index(np.argmax(size_LP), size_LP.shape)
    part = target["through"]["prototypes"][layer][prototype]
    fall = target["measured"]["prototypes"][layer][prototype]
    assert first.startswith(f"After “{PROMPT}”, “town” has a probability of ")
    assert f"prototype L{layer}P{prototype} carries most to it" in first
    assert f"{number(part, '+.2f')} of a logit of {number(target['logit'], '.2f')} nats" in first
    assert first.endswith(f"changes by {number(-fall, '+.2f')} if it is never read.")


def test_numbers_of_the_file_are_those_of_the_decomposition(run, attributed):
    _, content, _ = attributed
    model = protot_jax.load_run(run)
    tokens = prompt_tokens(model.tokenizer, PROMPT)
    assert [each["id"] for each in content["tokens"]] == tokens
    for target in content["targets"]:
        parts = attribute(model, tokens, targets=[target["token"]["id"]])
        share_LNTS = np.asarray(parts.through_XLNTS[0], np.float64)
        assert target["through"]["prototypes"] == share_LNTS.sum((2, 3)).tolist()
        assert target["logit"] == float(parts.logit_X[0])
        sizes = np.sort(np.abs(share_LNTS).ravel())[::-1]
        listed = [abs(pair["share"]) for pair in target["pairs"]]
        assert listed == sizes[:7].tolist()
        for pair in target["pairs"]:
            assert pair["key"] < pair["query"] < len(tokens)
            at = tuple(pair[name] for name in ("layer", "prototype", "query", "key"))
            assert pair["share"] == share_LNTS[at] and 0 < pair["weight"] <= 1
        count = target["pairs_for_90_percent"]
        assert sizes[: count - 1].sum() < 0.9 * sizes.sum() <= sizes[:count].sum() * (1 + 1e-12)
        assert target["entries"] == np.count_nonzero(share_LNTS)
        largest = max(target["certificate"]["sources"], *target["certificate"]["layers"])
        assert max(largest, target["certificate"]["direct"]) <= 1e-5
        # The sums can be made again from the file alone.
        sources, direct = target["sources"], target["direct"]
        size = np.abs([*sources["tokens"], *np.ravel(sources["mlps"])]).sum()
        total = sum(sources["tokens"]) + np.sum(sources["mlps"]) + sources["constant"]
        assert total == pytest.approx(target["logit"], rel=0, abs=1e-5 * size)
        total = np.sum(direct["prototypes"]) + sum(direct["mlps"]) + direct["token"]
        assert total + direct["constant"] == pytest.approx(target["logit"], rel=0, abs=1e-5 * size)


def test_sums_that_miss_are_called_so(attributed):
    folder, content, _ = attributed
    content = copy.deepcopy(content)
    content["targets"][1]["certificate"]["layers"][1] = 2e-3
    missed = parse_result(content, AttributionReport)
    page = frame.page(report.build(STUDY.config(), missed, folder), folder)
    assert "The parts do not sum to the logits" in page and "All parts sum" not in page


def test_the_page_shows_every_target_and_whether_the_parts_sum(attributed):
    folder, content, _ = attributed
    missed = copy.deepcopy(content)
    missed["targets"][1]["certificate"]["layers"][1] = 2e-3
    for one, all_sum in ((content, True), (missed, False)):
        built = report.build(STUDY.config(), parse_result(one, AttributionReport), folder)
        page = frame.page(built, folder)
        assert ("All parts sum to the logits of the forward pass" in page) == all_sum
        assert ("The parts do not sum to the logits" in page) != all_sum
    assert page.count(figure.MARK) == 4 * 2 and PROMPT in page
    labels = ("part of the logit (nats)", "fall of the logit (nats)", "constant; later (nats)")
    for shown in ("Next token: town", "Next token: people", *labels):
        assert shown in page
    # The one share is without a unit: of a token in the mean that is read.
    assert re.findall(r"\S+ shares?\b", without_scripts(page)) == ["the share"]


def test_other_targets_have_a_folder_of_their_own(run, attributed):
    folder, _, _ = attributed
    other = STUDY.config(run=str(run), prompt=PROMPT, targets=("town",)).default_folder()
    assert other.parent == folder.parent and other != folder


def test_a_run_of_the_version_before_is_read(attributed, tmp_path):
    folder, content, _ = attributed
    (tmp_path / "attribution.json").write_text(json.dumps(content))
    assert frame.load_summary(STUDY, tmp_path) == frame.load_summary(STUDY, folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--prompt='' has"),
        ((f"--prompt={PROMPT}", "--targets=xyzzy"), "xyzzy"),
        ((f"--prompt={PROMPT}", "--targets=town,town"), "names a token twice"),
        ((f"--prompt={PROMPT}", "--targets=townhouse"), "tokens ("),
        ((f"--prompt={'town ' * 40}",), "training context of 32"),
        ((f"--prompt={PROMPT}", "--run_seed=9"), "seed = 9"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(run, flags, message, tmp_path, capsys):
    folder = tmp_path / "none"
    assert launched(f"--run={run}", *flags, f"--workdir={folder}") in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not folder.exists()
