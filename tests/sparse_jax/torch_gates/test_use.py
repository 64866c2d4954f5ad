"""What users of torch do with gates: padding, caches, masks, other dtypes; and what is refused."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.weights.peft import load_peft
from sparse_jax import torch_gates
from sparse_jax.gates import model as sparse_model
from sparse_jax.torch_gates.attention import attention
from sparse_jax.torch_gates.gates import Layer
from tests import rounding
from tests.lm_jax.weights.test_peft import write
from tests.sparse_jax.torch_gates.test_parity import exported, gated, theirs
from tools import make_goldens

torch_test = pytest.mark.torch
# A difference of results in float64, of size 1, that is rounding and no other number of keys.
EQUAL = 1e-12
FOLDER = published.resolve_model("pair_192_sparse")
TOKENS_BT = np.random.default_rng(0).integers(2, 40, (2, 11))


@pytest.fixture
def small(tmp_path):
    """A tiny Mistral with grouped keys and a window of 4, in float64: sums of any order agree."""
    import torch

    return torch_gates.load(exported("mistral", tmp_path), dtype=torch.float64)


def run(model, tokens_BT, **options):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens_BT), **options)


def test_torch_is_imported_by_nothing_that_jax_needs():
    """Whether it is installed or not; and where it is not, the error says how to get it."""
    code = (
        "import sys, sparse_jax.torch_gates as gates; from lm_jax.errors import UsageError\n"
        "assert 'torch' not in sys.modules; sys.modules['torch'] = None\n"
        "for call in (gates.register, lambda: gates.load('pair_192_sparse')):\n"
        "    try: call()\n"
        "    except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "torch_gates needs torch; run: pip install torch\n"


@torch_test
def test_padding_before_a_text_or_after_it_changes_nothing(small):
    """Nor is it counted: the row of a batch has the edges of its text alone."""
    import torch

    model, gates = small
    gates.keep_masks = True
    text, T = TOKENS_BT[:1, :6], 11
    alone = run(model, text).logits
    counts_LBN, pairs_LB = gates.open_edges_LBN, gates.pairs_LB
    open_LBNTS = torch.stack(gates.open_LBNTS)
    for at in (slice(0, 6), slice(T - 6, T)):
        tokens_BT, valid_BT = TOKENS_BT.copy(), np.zeros((2, T), np.int64)
        tokens_BT[0, at], valid_BT[0, at], valid_BT[1] = text, 1, 1
        valid_BT = torch.tensor(valid_BT)
        positions_BT = (valid_BT.cumsum(1) - 1).clamp(min=0)
        padded = run(model, tokens_BT, attention_mask=valid_BT, position_ids=positions_BT).logits
        torch.testing.assert_close(padded[:1, at], alone, rtol=0, atol=EQUAL)
        assert torch.equal(gates.open_edges_LBN[:, :1], counts_LBN)
        assert torch.equal(gates.pairs_LB[:, :1], pairs_LB)
        padded_LBNTS = torch.stack(gates.open_LBNTS)[:, :1]
        assert torch.equal(padded_LBNTS[:, :, :, at, at], open_LBNTS)
        assert padded_LBNTS.sum() == open_LBNTS.sum()


@torch_test
def test_a_cache_gives_what_the_whole_text_does(small):
    """Beyond the window too, whose cache has dropped its first keys."""
    import torch

    model, gates = small
    whole = run(model, TOKENS_BT).logits
    counts_LBN, cache, total_LBN = gates.open_edges_LBN, None, 0
    for tokens_BT in (TOKENS_BT[:, :5], *np.split(TOKENS_BT[:, 5:], 6, axis=1)):
        out = run(model, tokens_BT, past_key_values=cache, use_cache=True)
        cache, total_LBN = out.past_key_values, total_LBN + gates.open_edges_LBN
    torch.testing.assert_close(out.logits[:, -1], whole[:, -1], rtol=0, atol=EQUAL)
    assert torch.equal(total_LBN, counts_LBN)
    prompt = torch.tensor(TOKENS_BT)
    options = {"max_new_tokens": 3, "do_sample": False}
    answers = [model.generate(prompt, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*answers)


@torch_test
def test_a_mask_of_bools_decides_what_a_query_sees_and_one_of_numbers_is_refused(small):
    import torch

    model, gates = small
    causal = np.tril(np.ones((11, 11), bool)) & ~np.tril(np.ones((11, 11), bool), -4)
    wanted = run(model, TOKENS_BT).logits
    mask = torch.tensor(causal)[None, None]
    assert torch.equal(run(model, TOKENS_BT, attention_mask=mask).logits, wanted)
    assert gates.pairs_LB.tolist() == [[causal.sum()] * 2] * 3
    with pytest.raises(UsageError, match=r"torch.float32 and shape \(1, 1, 11, 11\)"):
        run(model, TOKENS_BT, attention_mask=mask.float())


@torch_test
@pytest.mark.parametrize("options", [{}, {"raw_gate": True}, {"renormalise": True}])
def test_the_function_on_bfloat16_rounds_its_output_alone(options):
    """Against the definition on the same numbers: products and weights are float32."""
    import torch

    rng = np.random.default_rng(0)
    sizes = {"q": (2, 7, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
    arrays = {
        name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)
        for name, shape in sizes.items()
    }
    bias_N = np.array([0.1, -0.2, 0.3, -0.4], np.float32)

    def function(q_BTNH, k_BSKH, v_BSKH):
        k_BSNH, v_BSNH = (jnp.repeat(x, 2, axis=2) for x in (k_BSKH, v_BSKH))
        raw_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
        raw = {"raw": raw_BNTS} if "raw_gate" in options else {}
        visible_BNTS = jnp.broadcast_to(jnp.tri(7, dtype=bool), raw_BNTS.shape)
        pattern_BNTS, open_BNTS = gated(
            8**-0.5 * raw_BNTS,
            jnp.asarray(bias_N),
            visible_BNTS,
            renormalise="renormalise" in options,
            **raw,
        )
        return jnp.einsum("BNTS,BSNH->BTNH", pattern_BNTS, v_BSNH), open_BNTS.sum((2, 3))

    exact = rounding.expected(function, *arrays.values())
    assert not exact.bounds[1].any()
    gates = torch_gates.TorchGates(
        None, bias_N[None], "raw_gate" in options, "renormalise" in options
    )
    module = torch.nn.Module().eval()
    module.sparse_gates = Layer(gates, 0)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    q, k, v = (
        torch.tensor(np.asarray(x)).transpose(1, 2).to(torch.bfloat16) for x in arrays.values()
    )
    # Autocast rounds products elsewhere.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_BTNH, pattern_BNTS = attention(module, q, k, v, mask)
    assert out_BTNH.dtype == pattern_BNTS.dtype == torch.bfloat16
    values, bounds = exact.values[0], exact.bounds[0]
    rounded = rounding.Expected(values, bounds + 2.0**-8 * (np.abs(values) + bounds))
    rounding.assert_within(out_BTNH.float().numpy(), rounded)
    # A weight that is not 0 stays so in bfloat16, which has the exponents of float32.
    open_BN = (pattern_BNTS > 0).sum((2, 3))
    np.testing.assert_array_equal(open_BN.numpy(), exact.values[1])


@torch_test
def test_biases_are_not_rounded_with_the_weights():
    """A score of -0.125 and a bias of 0.1251, which is 0.125 in bfloat16."""
    import torch

    gates = torch_gates.TorchGates(None, np.full((1, 1), 0.1251, np.float32), False, False)
    module = torch.nn.Module().eval()
    module.sparse_gates = Layer(gates, 0)
    module.to(torch.bfloat16)
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    out, _ = attention(module, -0.125 * one, one, one, mask, scaling=1.0)
    assert out.item() == 1.0
    out, _ = attention(module, -0.126 * one, one, one, mask, scaling=1.0)
    assert out.item() == 0.0


@torch_test
def test_edges_are_those_of_the_last_pass(small):
    model, gates = small
    with pytest.raises(UsageError, match="run the model on tokens first"):
        gates.pairs_LB  # noqa: B018
    run(model, TOKENS_BT)
    with pytest.raises(UsageError, match="keep_masks was false in the last pass"):
        gates.open_LBNTS  # noqa: B018
    first = gates.open_edges_LBN
    run(model, TOKENS_BT[:1, :3])
    assert gates.open_edges_LBN.shape == (3, 1, 4) and first.shape == (3, 2, 4)
    assert gates.pairs_LB.tolist() == [[6]] * 3
    model.set_attn_implementation("eager")
    run(model, TOKENS_BT)
    with pytest.raises(UsageError, match="'eager' of the model ignores its gates"):
        gates.open_edges_LBN  # noqa: B018


@torch_test
def test_what_has_no_gates_is_refused(tmp_path):
    from lm_jax.weights.compat import transformers

    torch_gates.register()
    auto = transformers().AutoModelForCausalLM
    folder = exported("llama_gqa", tmp_path)
    dense = auto.from_pretrained(folder, attn_implementation="eager")
    with pytest.raises(UsageError, match="attn_implementation = 'eager' of this model ignores"):
        torch_gates.load_gates(dense)
    sparse = auto.from_pretrained(folder, attn_implementation=torch_gates.NAME)
    with pytest.raises(UsageError, match=r"this model has no gates yet; call torch_gates.load_g"):
        run(sparse, TOKENS_BT)
    golden = make_goldens.GOLDEN / "llama_gqa"
    with pytest.raises(BadInputError, match=r"has no sparse\.json, so it is no sparse model"):
        torch_gates.load_gates(auto.from_pretrained(golden, attn_implementation=torch_gates.NAME))
    with pytest.raises(BadInputError, match=r"has no sparse\.json, so it is no sparse model"):
        torch_gates.load(golden)
    # Of another model, of the same with other weights, and at last its own.
    with pytest.raises(BadInputError, match=r"model: \S+ is not that of .*whose gates"):
        torch_gates.load_gates(sparse, FOLDER)
    sparse.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1.0
    with pytest.raises(BadInputError, match=r"layers\.1\.self_attn\.q_proj\.weight is not that"):
        torch_gates.load_gates(sparse)
    sparse.model.layers[1].self_attn.q_proj.weight.data[0, 0] -= 1.0
    (folder / "config.json").unlink()
    with pytest.raises(BadInputError, match=r"config\.json"):
        torch_gates.load_gates(sparse)


@torch_test
def test_gates_of_a_published_model_are_found_by_its_name():
    model, gates = torch_gates.load("pair_192_sparse")
    assert repr(gates) == "TorchGates(4 layers of 16 heads; open where q.k + bias > 0)"
    assert model.training is False
    note = sparse_model.read_note(FOLDER)
    np.testing.assert_array_equal(gates.bias_LN, np.float32(note["gate_bias"]))


@torch_test
def test_adapters_over_a_base_are_merged_first(tmp_path):
    golden = make_goldens.GOLDEN / "llama_gqa"
    write(tmp_path / "adapter", "llama_gqa", base_model_name_or_path=str(golden))
    base = lm_jax.load_pretrained(golden)
    adapters, settings = load_peft(tmp_path / "adapter", base)
    bias_LN = 0.5 * np.random.default_rng(4).normal(size=(3, 4)).astype(np.float32)
    gates, folder = sparse_model.Gates(bias_LN), tmp_path / "sparse"
    sparse_model.save_over(folder, str(golden), base, adapters, settings, gates, {})
    model, gates = torch_gates.load(folder)
    sparse = sparse_model.load(folder)
    sparse_model.save(tmp_path / "whole", sparse.base, sparse.gates, {})
    merged = theirs(*torch_gates.load(tmp_path / "whole"), TOKENS_BT)
    for own, wanted in zip(theirs(model, gates, TOKENS_BT)[0], merged[0], strict=True):
        np.testing.assert_array_equal(own, wanted)
    # And they are not the base.
    dense = run(torch_gates.load(exported("llama_gqa", tmp_path))[0], TOKENS_BT).logits
    assert np.abs(merged[0][0] - dense.numpy()).max() > 1e-2
    with pytest.raises(BadInputError, match=r"adapters over a base; .*torch_gates\.load"):
        torch_gates.load_gates(model, folder)


class Bridge:
    """What gates need of a bridge of TransformerLens: hooks between scores and pattern."""

    def __init__(self, model):
        self.original_model, self.hooks = model, {}
        model.set_attn_implementation("eager")

    def add_hook(self, name, hook, *, is_permanent):
        assert is_permanent
        self.hooks[name] = hook

    def attention(self, layer, module, q_BNTH, k_BKSH, v_BKSH, mask):
        import torch

        groups = q_BNTH.shape[1] // k_BKSH.shape[1]
        k_BNSH, v_BNSH = (x.repeat_interleave(groups, 1) for x in (k_BKSH, v_BKSH))
        score_BNTS = q_BNTH @ k_BNSH.mT * module.scaling
        lowest = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min)
        score_BNTS = self.hooks[f"blocks.{layer}.attn.hook_attn_scores"](score_BNTS + lowest, None)
        pattern_BNTS = self.hooks[f"blocks.{layer}.attn.hook_pattern"](score_BNTS.softmax(-1), None)
        return (pattern_BNTS @ v_BNSH).transpose(1, 2), pattern_BNTS


@torch_test
@pytest.mark.parametrize("options", [{}, {"raw_gate": True, "renormalise": True}])
def test_hooks_of_a_bridge_close_what_the_function_does(options, tmp_path):
    import torch

    folder = exported("llama_gqa", tmp_path, **options)
    model, gates = torch_gates.load(folder, dtype=torch.float64)
    bridge = Bridge(model)
    layers = [each.self_attn for each in model.model.layers]
    torch.manual_seed(0)
    q_BNTH, k_BKSH, v_BKSH = (torch.randn(2, n, 11, 6).double() for n in (4, 2, 2))
    mask = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, 11, 11).clone()
    mask[0, :, 7:] = False  # queries of padding
    given = q_BNTH, k_BKSH, v_BKSH, mask
    outputs, counts = [], []
    for module in layers:
        outputs.append(attention(module, *given, scaling=module.scaling))
    model.set_attn_implementation(torch_gates.NAME)
    counts = [gates.open_edges_LBN, gates.pairs_LB]
    torch_gates.add_to_bridge(bridge, gates)
    assert len(bridge.hooks) == 6 and model.config._attn_implementation == torch_gates.NAME
    for layer, (module, output) in enumerate(zip(layers, outputs, strict=True)):
        result = bridge.attention(layer, module, *given)
        torch.testing.assert_close(result, output, rtol=0, atol=EQUAL)
    assert torch.equal(gates.open_edges_LBN, counts[0]) and torch.equal(gates.pairs_LB, counts[1])
    assert 0.2 < counts[0].sum() / (4 * counts[1].sum()) < 0.8
    with pytest.raises(UsageError, match="gates would close twice"):
        run(model, TOKENS_BT)
    with pytest.raises(UsageError, match="in a bridge already"):
        torch_gates.add_to_bridge(bridge, gates)


@torch_test
def test_a_bridge_that_cannot_be_made_sparse_is_refused(tmp_path):
    model, gates = torch_gates.load(exported("gemma2", tmp_path, raw_gate=True))
    with pytest.raises(UsageError, match=r"a raw gate needs q\.k"):
        torch_gates.add_to_bridge(Bridge(model), gates)
    with pytest.raises(UsageError, match="another model than these gates"):
        torch_gates.add_to_bridge(Bridge(torch_gates.load(FOLDER)[0]), gates)


@torch_test
def test_the_gradient_is_that_of_what_was_computed():
    """A closed edge passes nothing on, and no gate opens or closes under a small change."""
    import torch

    torch.manual_seed(0)
    gates = torch_gates.TorchGates(None, np.full((1, 4), 0.1, np.float32), False, True)
    module = torch.nn.Module().eval()
    module.sparse_gates = Layer(gates, 0)
    given = [torch.randn(1, n, 5, 3).double().requires_grad_() for n in (4, 2, 2)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    assert torch.autograd.gradcheck(lambda *qkv: attention(module, *qkv, mask)[0], given)
    edges = gates._passed[0].open_BN
    assert 4 < edges.sum() < 56
