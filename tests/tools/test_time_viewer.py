"""The benchmark of the graph page: what it times is what the page does."""

import json
import re

import pytest

from sparse_jax.studies.graphs import page
from tests.browser import needs_browser
from tools import time_viewer

pytestmark = pytest.mark.slow

# A page whose sliders compute for 80 ms.
BUSY = """<script>
addEventListener("input", () => {
  const end = performance.now() + 80;
  while (performance.now() < end);
}, true);
</script></body>"""


@needs_browser
def test_times_include_what_the_page_computes(tmp_path, monkeypatch, capsys):
    build = page.build

    def busy_build(document):
        text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", build(document))
        return text.replace("</body>", BUSY)

    monkeypatch.setattr(time_viewer.page, "build", busy_build)
    raw = tmp_path / "raw.json"
    small = ["--nodes=30", "--links=60", "--repeats=2", f"--json={raw}"]
    assert time_viewer.main(small) == 0
    milliseconds = json.loads(raw.read_text("utf-8"))["milliseconds"]
    assert set(milliseconds) == set(time_viewer.ACTIONS)
    for name, times in milliseconds.items():
        busy = [value >= 80 for value in times["script"]]
        assert busy == [name.startswith("move")] * 2, name
        assert all(a >= b for a, b in zip(times["frames"], times["script"], strict=True))
    printed = capsys.readouterr().out
    assert all(name in printed for name in time_viewer.ACTIONS)


def test_a_graph_file_that_is_none_is_refused(tmp_path, capsys):
    wrong = tmp_path / "graph.json"
    wrong.write_text("{}", "utf-8")
    assert time_viewer.main([f"--graph={wrong}"]) != 0
    assert "error: " in capsys.readouterr().err
