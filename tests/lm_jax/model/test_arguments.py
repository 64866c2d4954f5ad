"""What is given in place of token ids or a mapping of sites is refused in a sentence."""

import functools

import jax.numpy as jnp
import pytest

import lm_jax
from lm_jax.errors import UsageError
from tests import tiny

CFG = tiny.decoder()
TOKENS = jnp.array([[1, 2, 3]])


@functools.cache
def params():
    import jax

    return lm_jax.init_params(jax.random.key(0), CFG)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("a text", "tokens_BT is text; encode it by the tokenizer, or call model.run"),
        (["a text", "another"], "tokens_BT is text"),
        ([[1, 2]], r"tokens_BT is a list; give an array of token ids, such as jnp.array"),
        (TOKENS[0], r"tokens_BT has the shape \(3,\); give \[B, T\], as tokens\[None\]"),
        (TOKENS[None], r"tokens_BT has the shape \(1, 1, 3\); give \[B, T\]$"),
        (TOKENS.astype(float), "tokens_BT is of float32; token ids are whole numbers"),
    ],
)
def test_what_are_no_token_ids_is_refused(tokens, message):
    with pytest.raises(UsageError, match=message):
        lm_jax.forward(params(), tokens, CFG)


@pytest.mark.parametrize("name", ["edits", "record"])
def test_a_list_of_sites_is_refused(name):
    with pytest.raises(UsageError, match=f"{name} is a list; give a mapping of sites to .*attn.z"):
        lm_jax.forward(params(), TOKENS, CFG, **{name: ["attn.z"]})


@pytest.mark.parametrize("name", ["edits", "record"])
def test_a_name_with_a_typo_is_refused_with_the_nearest(name):
    with pytest.raises(UsageError, match=f"{name}: no site 'attn.zz'; did you mean 'attn.z'"):
        lm_jax.forward(params(), TOKENS, CFG, **{name: {"attn.zz": lm_jax.keep}})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a text", "prompts is text; encode it"),
        (["a text"], "prompts is text; encode it"),
        ([1, 2, 3], r"give one for each prompt, as \[ids\] for one"),
        (TOKENS[0], r"give one for each prompt, as \[ids\] for one"),
    ],
)
def test_what_are_no_prompts_is_refused(prompts, message):
    if not isinstance(prompts, str | list):
        prompts = prompts.tolist()
    with pytest.raises(UsageError, match=message):
        lm_jax.generate(params(), prompts, CFG, max_new_tokens=1)


def test_more_tokens_than_the_context_are_refused():
    """In generation; `forward` goes on, as rotations do."""
    with pytest.raises(lm_jax.errors.BadInputError, match="exceeds the model's context of"):
        lm_jax.generate(params(), [[1]], CFG, max_new_tokens=CFG.max_length)
