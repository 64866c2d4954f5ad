"""A plan is what the compiler says, and what can be counted by hand, on eight fake devices."""

import json
import math
import os
from pathlib import Path
import subprocess
import sys

import jax
import pytest

from lm_jax.errors import UsageError
from lm_jax.weights.load import open_pretrained
from tools import plan_training
from tools.collectives import Collective, collectives
from tools.make_goldens import GOLDEN
from tools.plan_training import PRESETS, Workload, memory, roofline

ROOT = Path(__file__).parents[2]
MODEL = GOLDEN / "llama_gqa"
ROWS, CONTEXT = 2, 16
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2))

# By hand, for width 24 in three layers: norms, q, k, v and o of four heads and two key heads of
# width 6, an MLP of 40; a vocabulary of 48, in and out.
LAYERS = 3 * (2 * 24 + 24 * 24 + 2 * 24 * 12 + 24 * 24 + 3 * 24 * 40)
TABLE = 48 * 24
PARAMETERS = LAYERS + 2 * TABLE + 24
# The step, and the two counts of AdamW and of its schedule.
COUNTERS = 3 * 4
TOKENS = 4 * ROWS * (CONTEXT + 1)


def workload(cfg):
    return Workload(cfg, ROWS, CONTEXT, "float32")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """By mesh, from one process of the command: this one has four devices."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    flags = [f"--mesh={','.join(map(str, sizes))}" for sizes in MESHES]
    flags += [f"--rows={ROWS}", f"--context={CONTEXT}", "--dtype=float32"]
    subprocess.run(
        [
            *(sys.executable, "-m", "tools.plan_training", f"--model={MODEL}"),
            *(*flags, "--compile", f"--json={file}"),
        ],
        cwd=ROOT,
        env=os.environ,
        check=True,
        capture_output=True,
    )
    results = json.loads(file.read_text("utf-8"))
    return {tuple(each["mesh"]): each for each in results}


@pytest.mark.parametrize(("sizes", "ways"), [((8, 1, 1), 1), ((1, 8, 1), 8)])
def test_the_state_is_counted_by_hand_by_formula_and_by_the_compiler(compiled, sizes, ways):
    need = memory(workload(open_pretrained(MODEL).cfg), sizes)
    assert need.state == 3 * 4 * PARAMETERS // ways
    assert need.gradients == 4 * PARAMETERS // ways
    assert need.copy == 0
    assert compiled[sizes]["arguments"] == need.state + COUNTERS + TOKENS


# Runs and bytes by collective and devices: of XLA in jaxlib 0.10. A change of the program, or of
# the sharding rules, that moves more shows here; write the table again if it is meant.
COUNTED = {
    (8, 1, 1): {("all-reduce", 8): (5, 65_200)},
    (1, 8, 1): {
        ("all-gather", 8): (61, 117_856),
        ("all-reduce", 8): (6, 60_640),
        ("all-to-all", 8): (2, 6_144),
    },
    (2, 2, 2): {
        ("all-gather", 2): (45, 62_976),
        ("all-gather", 8): (17, 1_632),
        ("all-reduce", 2): (21, 109_440),
        ("all-reduce", 4): (5, 5_296),
        ("all-reduce", 8): (4, 84),
        ("collective-permute", 8): (2, 2_304),
    },
}


@pytest.mark.parametrize("sizes", MESHES)
def test_the_collectives_of_a_step(compiled, sizes):
    counted = {
        (each["op"], each["devices"]): (each["runs"], each["bytes"])
        for each in compiled[sizes]["collectives"]
    }
    if jax.__version_info__[:2] == (0, 10):
        assert counted == COUNTED[sizes]
    total = sum(size for _, size in counted.values())
    # Another compiler may cut them up in other ways, but not send more.
    assert total <= 1.1 * sum(size for _, size in COUNTED[sizes].values())


def test_the_bytes_of_the_table_are_those_of_the_method():
    """Data parallel adds up gradients; fsdp also gathers weights, forward and backward."""
    # Beside gradients, the sums of losses, tokens and squares.
    assert COUNTED[8, 1, 1]["all-reduce", 8][1] - 4 * PARAMETERS == 16
    ids = 4 * 8 * ROWS * CONTEXT
    once_more = 4 * 3 * 24
    gathered = 4 * (2 * LAYERS + TABLE + 2 * 24) + once_more + ids
    assert COUNTED[1, 8, 1]["all-gather", 8][1] == gathered
    # The gradient of the embedding is made where its part is: tokens' vectors go there.
    assert COUNTED[1, 8, 1]["all-reduce", 8][1] - 4 * (PARAMETERS - TABLE) == 64
    assert COUNTED[1, 8, 1]["all-to-all", 8][1] == 2 * 4 * ROWS * CONTEXT * 24


HLO = """HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %g = bf16[4,8]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
}

%outer (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %w = (s32[]) while(%p), body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %s = f32[5]{0} reduce-scatter(%y), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %v = (s32[]) while(%p), body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %r = (f32[2]{0}, /*index=1*/s32[]) all-reduce(%p, %q), replica_groups={{0,1},{2,3}}, to_apply=%add
  %m = pred[3]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
}
"""


def test_collectives_count_as_often_as_their_loops():
    assert collectives(HLO) == [
        Collective("all-gather", 4, 15, 15 * 64),
        Collective("all-reduce", 2, 1, 12),
        Collective("collective-permute", 8, 1, 3),
        Collective("reduce-scatter", 4, 5, 5 * 80),
    ]
    assert [each.sent for each in collectives(HLO)] == [15 * 48, 12, 3, 5 * 60]
    for text, said in (
        (HLO.replace("all-gather(", "all-gather-start("), "compile the program for CPUs"),
        (HLO.replace('{"n":"3"}', "{}"), "the loop inner has a collective and no known trip count"),
    ):
        with pytest.raises(UsageError, match=said):
            collectives(text)


def test_the_presets_have_the_parameters_of_their_models():
    counts = {
        name: plan_training.parameters_on_a_device(plan_training.param_spec(cfg), (1, 1, 1))
        for name, cfg in PRESETS.items()
    }
    assert counts == {"135M": 134_515_008, "1B": 1_235_814_400, "7B": 6_738_415_616}


def test_the_roofline_of_a_published_step():
    """Llama 2 7B on 8 H100s in 0.721 s (JAX-Toolbox's MaxText, 2 x 4,096 tokens on each)."""
    bound = roofline(Workload(PRESETS["7B"], 2, 4_096), (1, 8, 1))
    tokens = 2 * 4_096
    # Six operations for each weight but the embedding's, and scores with weighted sums of all T
    # keys, forward once and backward twice.
    weights = 6_738_415_616 - 32_000 * 4_096 - 65 * 4_096
    flops = tokens * (6 * weights + 3 * 32 * 4 * 4_096 * 4_096)
    assert bound.compute["square"] == pytest.approx(flops / 989.4e12, rel=1e-12)
    assert bound.compute["square"] / 0.721 == pytest.approx(0.529, abs=5e-4)
    assert bound.compute["triangle"] / 0.721 == pytest.approx(0.492, abs=5e-4)
    # No published step is faster than the bound.
    assert bound.rate("square", overlap=True) > 11_362
    assert bound.node == pytest.approx(3 * 2 * 6_738_415_616 * 7 / 8 / 450e9)
    assert bound.network == 0
    two_nodes = roofline(Workload(PRESETS["7B"], 2, 4_096), (2, 8, 1))
    assert two_nodes.network == pytest.approx(2 * 6_738_415_616 / 8 / 50e9)
    parts = (two_nodes.compute["square"], two_nodes.node, two_nodes.network)
    assert two_nodes.rate("square", overlap=False) == pytest.approx(tokens / math.fsum(parts))


def test_what_crosses_nodes_is_charged_to_the_network():
    """A gathered array of 7B weights in bfloat16 comes to each node once, by its eight cards."""
    size = 2 * 6_738_415_616

    def sending(*sizes):
        bound = roofline(Workload(PRESETS["7B"], 2, 4_096), sizes)
        return bound.node, bound.network

    assert sending(1, 16, 1) == pytest.approx(
        (3 * size * 7 / 8 / 450e9, 3 * size / 8 * (1 / 2) / 50e9)
    )
    # Copies within a node add up their gradients there; of eight, four in each of two nodes.
    assert sending(8, 1, 1) == pytest.approx((2 * size * 7 / 8 / 450e9, 0))
    assert sending(8, 2, 1) == pytest.approx(
        ((3 * size / 2 + 2 * size / 2 * 3 / 4) / 450e9, 2 * size / 2 / 4 * (1 / 2) / 50e9)
    )


def test_the_document_has_the_table_of_the_command():
    text = (ROOT / "docs" / "scale" / "index.md").read_text("utf-8")
    section = text.split("## By formula\n")[1].split("\n## ")[0]
    head, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [tuple(line.strip("| ").split(" | ")) for line in (head, *lines)]
    rows = [
        plan_training.row(name, Workload(cfg, 2, 4_096), sizes)
        for name, cfg in PRESETS.items()
        for sizes in plan_training.MESHES
    ]
    assert cells == [plan_training.HEADS, *rows]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mesh=8"], "is not data,fsdp,tensor"),
        (["--mesh=1,1,2"], "add --compile"),
        (["--mesh=1,12,1"], "--mesh=1,12,1 does not fill nodes of 8 GPUs; let fsdp divide 8"),
        (["--model=8B"], "8B"),
    ],
)
def test_what_is_refused(flags, said, capsys):
    assert plan_training.main(flags) in (2, 3)
    assert said in capsys.readouterr().err
