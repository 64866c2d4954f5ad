"""A folder of PEFT as a model: its base with the adapters merged in."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.model import lora
from lm_jax.model.params import by_path
from lm_jax.weights import peft, peft_settings
from lm_jax.weights.load import open_pretrained
from lm_jax.weights.peft import load_peft, save_peft
from tests.lm_jax.weights.test_peft import write
from tools import make_goldens

BASE = make_goldens.GOLDEN / "llama_gqa"


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "adapter", "llama_gqa", base_model_name_or_path=str(BASE))
    return tmp_path / "adapter"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_folder_of_adapters_is_its_base_with_them_merged_in(folder, dtype):
    base = lm_jax.load_pretrained(BASE, dtype=dtype)
    adapters, settings = load_peft(folder, base)
    merge = jax.jit(lambda p, a: lora.merge(p, a, settings))
    wanted = by_path(merge(base.params, adapters))
    loaded = lm_jax.load_pretrained(folder, dtype=dtype)
    for path, leaf in by_path(loaded.params).items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
    assert loaded.cfg == base.cfg
    assert loaded.run([1, 2, 3]).logits.shape[-1] == base.cfg.vocab_size


def test_its_identity_is_of_base_and_adapters_and_known_before_they_are_read(folder, tmp_path):
    opened, loaded = open_pretrained(folder), lm_jax.load_pretrained(folder)
    assert opened.identity == loaded.identity
    assert loaded.identity.weights != lm_jax.load_pretrained(BASE).identity.weights
    base = lm_jax.load_pretrained(BASE)
    adapters, settings = load_peft(folder, base)
    changed = jax.tree.map(lambda x: 2 * x, adapters)
    save_peft(tmp_path / "changed", base, changed, settings, name=str(BASE))
    assert open_pretrained(tmp_path / "changed").identity != opened.identity


def rewrite(folder, **changed):
    file = folder / peft_settings.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def test_its_identity_is_of_the_settings_that_decide_the_update(folder):
    first = open_pretrained(folder).identity
    modules = json.loads((folder / peft_settings.CONFIG).read_text())["target_modules"]
    rewrite(folder, target_modules=modules[::-1], alpha_pattern={}, task_type=None)
    assert open_pretrained(folder).identity == first
    # Names of modules with dots, of which the first pattern that fits counts.
    patterns = {"self_attn.q_proj": 8, "[qk]_proj": 32}
    digests = set()
    for items in (patterns.items(), list(patterns.items())[::-1]):
        rewrite(folder, alpha_pattern=dict(items))
        digests.add(open_pretrained(folder).identity.config)
    assert len(digests) == 2 and first.config not in digests
    rewrite(folder, alpha_pattern={}, lora_alpha=33.0)
    opened, loaded = open_pretrained(folder), lm_jax.load_pretrained(folder)
    assert opened.identity == loaded.identity != first
    assert opened.identity.weights == first.weights


def test_its_identity_does_not_tell_where_base_and_adapters_lie(tmp_path):
    identities = set()
    for own, base in (("1", "2"), ("2", "1")):
        shutil.copytree(BASE, tmp_path / f"{base}_base")
        folder = tmp_path / f"{own}_adapter"
        write(folder, "llama_gqa", base_model_name_or_path=str(tmp_path / f"{base}_base"))
        identities.add(open_pretrained(folder).identity.text)
    assert len(identities) == 1


def test_a_base_that_is_not_here_is_named(folder):
    file = folder / peft_settings.CONFIG
    config = json.loads(file.read_text())
    for name, message in (
        (None, "has no base_model_name_or_path; write there the model"),
        ("smollm3", "adapts a base that cannot be read: model 'smollm3' is no folder"),
    ):
        file.write_text(json.dumps(config | {"base_model_name_or_path": name}))
        with pytest.raises(BadInputError, match=message):
            lm_jax.load_pretrained(folder)


def test_a_folder_with_a_model_of_its_own_is_that_model(folder):
    """As trainers leave adapters beside the merged weights."""
    for file in BASE.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert lm_jax.load_pretrained(folder).sha256 == lm_jax.load_pretrained(BASE).sha256
    assert (folder / peft.WEIGHTS).is_file()
