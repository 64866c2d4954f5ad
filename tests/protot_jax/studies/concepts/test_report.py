"""The concept page holds its data unchanged, asks for nothing, runs no foreign text, and works."""

import dataclasses
import json
from pathlib import Path
import re

import jsonschema
import pytest

from lm_jax.report import page
from lm_jax.report.markup import number
from lm_jax.run.results import json_schema
import protot_jax
from protot_jax.studies.concepts import STUDY, report
from protot_jax.studies.concepts.results import ConceptReport
from tests.browser import PageReader, drive
from tests.protot_jax.studies.concepts import synthetic_report


def rendered(result):
    """The page of a report, without the provenance of a run."""
    built = report.build(STUDY.config(), result, Path())
    return page(
        built.title,
        built.sections(),
        provenance=built.facts,
        lead=built.lead,
        script=built.script,
        style=built.style,
    )


@pytest.mark.parametrize("options", [{}, {"hostile": True}, {"judge": "null"}, {"layers": 1}])
def test_the_page_holds_the_data_as_it_is(options):
    content = synthetic_report.build(**options)
    jsonschema.validate(content, json_schema(ConceptReport))
    reader = PageReader(rendered(synthetic_report.typed(content)))
    (embedded,) = [code for attrs, code in reader.scripts if attrs.get("id") == "report-data"]
    assert json.loads(embedded) == content
    assert not set("<>&") & set(embedded)


def test_foreign_text_is_never_markup():
    ordinary, hostile = (
        PageReader(rendered(synthetic_report.typed(synthetic_report.build()))),
        rendered(synthetic_report.typed(synthetic_report.build(hostile=True))),
    )
    reader = PageReader(hostile)
    hostile.encode()
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in ordinary.tags}
    # The libraries of the charts, what calls them, and the explorer.
    assert len([attrs for attrs, _ in reader.scripts if not attrs]) == 3
    assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
    # The name of the corpus is in the page, as text.
    assert f"trained on {synthetic_report.HOSTILE[1]} (" in reader.text


def test_a_lone_surrogate_cannot_make_the_page_unwritable():
    content = synthetic_report.typed(synthetic_report.build())
    broken = dataclasses.replace(content.texts[0], words=("\ud800", *content.texts[0].words[1:]))
    text = rendered(dataclasses.replace(content, texts=(broken, *content.texts[1:])))
    assert b"\\ud800" in text.encode()


def test_no_script_writes_markup_or_asks_for_anything():
    code = "".join(report._asset(name) for name in report._SCRIPTS)
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch("):
        assert way not in code


def test_a_page_of_the_default_model_stays_small():
    # As many texts as prototypes could show, if no two shared one.
    content = synthetic_report.build(6, 32, texts=1920, length=32, top=10)
    assert len(rendered(synthetic_report.typed(content)).encode()) < 5e6


def test_statistics_are_printed_with_their_intervals():
    text = PageReader(rendered(synthetic_report.typed(synthetic_report.build()))).text
    tests = (
        "−0.219[−0.310, −0.120]",
        "0.825[0.400, 1.20]",
        "0.140[0.100, 0.180]",
        "0.0210[−0.0300, 0.0700]",
    )
    for phrase in tests:
        assert phrase in text
    # Depth is part of the paper's numbers, which have no test.
    assert re.search(r"−0\.457\s+−0\.219 \(p 8", text)
    assert "For 62% of the prototypes the peak is one token before writing." in text
    assert "The first layer is left out" in text
    assert "2 prototypes are dead." in text


def test_missing_values_are_explained_in_words():
    content = synthetic_report.build(judge="null")
    content["half_life_repetition"]["spearman"].update(value=None, p=None, low=None, high=None)
    content["lag"].update(mean=[None] * 11, peaks_one_before=None)
    for p in content["prototypes"]:
        p.update(lag=None, half_life=None)
    text = PageReader(rendered(synthetic_report.typed(content))).text
    assert "made without a judge" in text
    assert "No prototype varies enough to have a peak." in text
    assert "8 prototypes have no finite half-life" in text
    unread = synthetic_report.build()
    for p in unread["prototypes"]:
        p["label"] = None
    text = PageReader(rendered(synthetic_report.typed(unread))).text
    assert "gave no answer that could be read" in text


def browse(folder, content, steps, **options):
    """Opens the page of `content`, and returns what the JavaScript `steps` return."""
    return drive(folder, rendered(synthetic_report.typed(content)), steps, **options)


@pytest.mark.slow
def test_a_link_opens_the_prototype_that_it_names(tmp_path):
    content = synthetic_report.build()
    result = browse(
        tmp_path,
        content,
        """
        const measure = $("#measure");
        const named = [...measure.options].find((o) => o.text === "write: MI above chance (nats)");
        measure.value = named.value; await act(measure, "input");
        return {
          information: $("#map button[aria-pressed=true]").ariaLabel,
          title: $("#opened h3").textContent,
          badge: $("#opened .badge").textContent,
          words: all("#opened .texts li:first-child .word").map((w) => w.textContent),
          readings: all("#opened .texts li:first-child .word").map((w) => w.dataset.values),
          strength: all("#opened .texts li:first-child .word")
            .map((w) => Number(w.style.getPropertyValue("--strength"))),
          lags: all("#opened .lags rect title").map((t) => t.textContent),
          edit: $("#opened code").textContent,
        };""",
        hash_="#layer=1&prototype=2",
    )
    (p,) = [p for p in content["prototypes"] if (p["layer"], p["prototype"]) == (1, 2)]
    assert result["title"] == "Layer 1, prototype 2"
    assert result["badge"] == f"half-life {number(p['half_life'])} tokens"
    value, chance = (
        p["write"][name] for name in ("mutual_information", "mutual_information_by_chance")
    )
    assert result["information"].endswith(
        f"above chance (nats) {number(value - chance)} ({number(value)}, by chance "
        f"{number(chance)})"
    )
    top_text = p["top_texts"][0]
    text = content["texts"][top_text["text"]]
    assert result["words"] == [word.strip() for word in text["words"]]
    # A word has the mean of its tokens.
    means = [
        sum(pair) / len(pair)
        for word in range(len(text["words"]))
        if (
            pair := [
                w for w, at in zip(top_text["write"], text["word_of"], strict=True) if at == word
            ]
        )
    ]
    lines = [
        re.search(r": write (.+) · read (.+) · memory (.+)", one)[1] for one in result["readings"]
    ]
    assert lines == [number(mean) for mean in means]
    low, high = min(means), max(means)
    assert result["strength"] == pytest.approx([(m - low) / (high - low) for m in means], abs=1e-6)
    assert result["lags"] == [
        f"lag {number(lag)}: {number(value)}"
        for lag, value in zip(content["lag"]["lags"], p["cross_correlation"], strict=True)
    ]
    # The edit that the page names is one.
    assert list(eval(result["edit"], {"protot_jax": protot_jax})) == ["mixer.read"]


READING = {
    (0, 0): (None, "It reads with its write gate (shared routing)."),
    (1, 0): (None, "A gate never varies within a text, so reading has no lag."),
    (1, 1): (0, "Reading peaks at the same token as writing."),
    (1, 2): (-1, "Reading peaks 1 token before writing."),
    (1, 3): (3, "Reading peaks 3 tokens after writing."),
}


@pytest.mark.slow
def test_it_says_how_reading_goes_with_writing(tmp_path):
    content = synthetic_report.build()
    for p in content["prototypes"]:
        p["lag"], _ = READING.get((p["layer"], p["prototype"]), (None, ""))
    result = browse(
        tmp_path,
        content,
        """
        const said = [];
        for (const [layer, prototype] of PLACES) {
          page.location.hash = `#layer=${layer}&prototype=${prototype}`; await settle();
          said.push(all("#opened .columns p").map((p) => p.textContent).join(" "));
        }
        return said;""".replace("PLACES", json.dumps([*READING])),
    )
    for said, (_, message) in zip(result, READING.values(), strict=True):
        assert message in said


@pytest.mark.slow
def test_searching_filtering_and_choosing_show_what_they_say(tmp_path):
    content = synthetic_report.build()
    content["prototypes"][5]["top_tokens"][0]["token"] = "Zebra"
    result = browse(
        tmp_path,
        content,
        """
        const listed = () => [$("#count").textContent, all("#matches b").map((b) => b.textContent)];
        const form = $("#filters").elements;
        const steps = {};
        form.query.value = "zebra"; await act(form.query, "input"); steps.search = listed();
        form.query.value = "no such words"; await act(form.query, "input");
        steps.nothing = listed();
        $("#filters").reset(); await settle(); steps.reset = listed();
        steps.infinite = all("#map button").filter((b) => b.ariaLabel.includes("∞"))
          .map((b) => [b.ariaLabel, b.style.getPropertyValue("--strength"),
            b.classList.contains("missing")]);
        form.alive.checked = true; await act(form.alive, "input"); steps.alive = listed()[0];
        form.labelled.checked = true; await act(form.labelled, "input");
        form.layer.value = "1"; await act(form.layer, "input"); steps.labelled = listed();
        $("#filters").reset(); await settle();
        form.low.value = "5"; await act(form.low, "input"); steps.low = listed();
        form.high.value = "9"; await act(form.high, "input"); steps.both = listed();
        all("#map button")[6].click(); await settle();
        steps.clicked = [page.location.hash, $("#opened h3").textContent];
        const absolute = $("input[value=absolute]");
        absolute.checked = true; await act(absolute, "input");
        const memory = $("input[value=memory]");
        memory.checked = true; await act(memory, "input");
        steps.absolute = all(".texts li:first-child .word")
          .map((w) => Number(w.style.getPropertyValue("--strength")));
        const word = all(".texts .word")[1]; word.focus(); await settle();
        steps.tip = [$("#tip").hidden, $("#tip").textContent];
        const drawing = $(".curves svg[tabindex]");
        drawing.dispatchEvent(new page.KeyboardEvent("keydown", { key: "ArrowRight" }));
        steps.readout = $(".readout").textContent;
        page.location.hash = "#layer=9&prototype=9"; await settle();
        steps.absent = $("#opened").textContent;
        return steps;""",
    )
    labelled = [p for p in content["prototypes"] if p["layer"] == 1 and p["label"]]
    lives = {
        f"L{p['layer']} P{p['prototype']}": p["half_life"] or float("inf")
        for p in content["prototypes"]
    }
    assert result["search"] == ["1 of 8 prototypes match", ["L1 P1"]]
    assert result["nothing"] == ["0 of 8 prototypes match", []]
    # Sorted by the number that colours the map, an infinite one first.
    finite = {name: life for name, life in lives.items() if life < float("inf")}
    assert result["reset"][0] == "All 8 prototypes"
    ranked = sorted(finite, key=lambda name: -finite[name])
    assert result["reset"][1] == ["L0 P3", "L1 P3", *ranked]
    assert result["infinite"] == [
        [f"Layer {layer}, prototype 3: half-life (tokens, log scale) ∞, dead", "1", False]
        for layer in (0, 1)
    ]
    assert result["alive"] == "6 of 8 prototypes match"
    assert set(result["labelled"][1]) == {f"L1 P{p['prototype']}" for p in labelled}
    assert set(result["low"][1]) == {name for name, life in lives.items() if life >= 5}
    assert set(result["both"][1]) == {name for name, life in lives.items() if 5 <= life <= 9}
    assert result["clicked"] == ["#layer=1&prototype=2", "Layer 1, prototype 2"]
    top_text = content["prototypes"][6]["top_texts"][0]
    text = content["texts"][top_text["text"]]
    assert result["absolute"][0] == pytest.approx(
        sum(top_text["memory"][: text["word_of"].count(0)]) / text["word_of"].count(0), abs=1e-6
    )
    hidden, tip = result["tip"]
    assert not hidden and tip.startswith(f"{text['words'][1].strip()}: write ")
    assert result["readout"].startswith("Token 0, ")
    assert "no layer 9 with a prototype 9" in result["absent"]


@pytest.mark.slow
def test_the_panel_shows_what_was_measured_and_where_a_word_comes_from(tmp_path):
    content = synthetic_report.build()
    result = browse(
        tmp_path,
        content,
        """
        const steps = { panel: $(".ablation p").textContent };
        steps.rows = all(".ablation tbody tr").map((row) => [...row.children]
          .map((cell) => cell.textContent));
        const words = all("#opened .texts li:first-child .word");
        words[0].click(); await settle();
        steps.first = $("#opened .carried").textContent;
        const word = words[words.length - 1];
        word.focus();
        word.dispatchEvent(new page.KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        await settle();
        steps.carried = all("#opened .carried tbody tr").map((row) => [...row.children]
          .map((cell) => cell.textContent));
        steps.sources = all("#opened .word.source").map((w) => words.indexOf(w));
        steps.chosen = all("#opened .word.chosen").map((w) => words.indexOf(w));
        steps.links = all("#opened .carried a").map((a) => a.getAttribute("href"));
        all("#opened .texts li:nth-child(3) .word")[1].click(); await settle();
        steps.absent = $("#opened .texts li:nth-child(3) .carried").textContent;
        return steps;""",
        hash_="#layer=1&prototype=2",
    )
    (p,) = [p for p in content["prototypes"] if (p["layer"], p["prototype"]) == (1, 2)]
    assert f"changes by {number(p['ablation']['change'])} nats on average" in result["panel"]
    assert "more harm than 63 % of the other 3 prototypes" in result["panel"]
    top_text = p["top_texts"][0]
    text = content["texts"][top_text["text"]]
    changes = [0.0] * len(text["words"])
    for word, change in zip(text["word_of"], top_text["ablated"], strict=True):
        changes[word] += change or 0
    most = sorted(range(len(changes)), key=lambda i: -abs(changes[i]))[:3]
    named = " · ".join(f"{text['words'][i].strip()} {number(changes[i])}" for i in most)
    mean = sum(top_text["ablated"][1:]) / (len(top_text["ablated"]) - 1)
    assert result["rows"][0] == ["text 1", number(mean), named] and len(result["rows"]) == 2
    # Nothing is before the first token.
    assert "no prototype has read a token before it" in result["first"]
    last = len(text["words"]) - 1
    rows, sources, links = [], set(), []
    for i in [i for i, word in enumerate(text["word_of"]) if word == last]:
        parts = (text["carried"][name][i] for name in ("layer", "prototype", "logit", "source"))
        for layer, prototype, logit, source, part in zip(
            *parts, text["carried"]["part"][i], strict=True
        ):
            where = (
                "the beginning" if source < 0 else f"“{text['tokens'][source].replace(' ', '␣')}”"
            )
            rows.append(
                [f"Layer {layer}, prototype {prototype}", number(logit), f"{where} {number(part)}"]
            )
            links.append(f"#layer={layer}&prototype={prototype}")
            sources |= {text["word_of"][source]} if source >= 0 else set()
    assert result["carried"] == rows and result["links"] == links
    assert set(result["sources"]) == sources and result["chosen"] == [last]
    # Its third text may be among the first two of another prototype.
    third = content["texts"][p["top_texts"][2]["text"]]
    assert ("first texts of each" in result["absent"]) == (third["carried"] is None)


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    result = browse(
        tmp_path,
        synthetic_report.build(hostile=True),
        """
        return {
          theme: $("#opened .label strong").textContent,
          tokens: all("#opened tbody th bdi").map((b) => b.textContent),
          content: all("#explorer img, #explorer script").length,
          scripts: all("script:not([type])").length,
        };""",
        hash_="#layer=0&prototype=0",
    )
    assert result["theme"] == synthetic_report.HOSTILE[0] + synthetic_report.HOSTILE[1]
    assert synthetic_report.HOSTILE[0] in result["tokens"]
    assert (result["content"], result["scripts"]) == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen(tmp_path, width):
    content = synthetic_report.build(2, 32, length=120, hostile=True)
    result = browse(
        tmp_path,
        content,
        """
        const root = page.document.documentElement;
        const wide = [];
        for (const [layer, prototype] of [[0, 0], [1, 1], [1, 31]]) {
          page.location.hash = `#layer=${layer}&prototype=${prototype}`; await settle();
          wide.push([root.clientWidth, root.scrollWidth]);
        }
        return wide;""",
        width=width,
    )
    assert [scrolled for _, scrolled in result] == [client for client, _ in result]
    assert all(width - 20 <= client <= width for client, _ in result)
