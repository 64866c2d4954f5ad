"""Answers under the 14 recipes of the paper's Table 2, against a hooked `transformers` model.

    python -m tools.bench.recipes                     SmolLM2-135M from the cache
    python -m tools.bench.recipes --model FOLDER --prompts 20 --length 128

Needle prompts of `--length` tokens are answered under every recipe, with `--bias` where a recipe
calibrates its own. Ours is the audit's forward pass, which compiles once for all recipes; theirs an
attention function that maps whole rows of scores. Both are timed in turns in batches of the same
size, so that load on the machine affects both; what compiling takes is printed beside the ratio. A
ratio is only printed where both give the same answers, but for logits closer than rounding.

Exit codes: 0, 1 different answers, 2 usage, 3 no such model.
"""

import argparse
from collections.abc import Sequence
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.text import corpora
from polyattn_jax.audit import measure
from polyattn_jax.recipes.row_maps import RECIPES, Recipe, resolve_bias
from polyattn_jax.suites import Suite, niah
from polyattn_jax.suites.batching import batches
from tools.bench import front
from tools.bench.in_torch import llama as torch_llama
from tools.bench.in_torch.recipes import RecipeModel

# Of two logits that rounding may put in another order.
TIE = 1e-2


def against_hooks(
    model: lm_jax.Pretrained, suite: Suite, batch_size: int, bias: float, repeats: int
) -> bool:
    """Times both on prompts of one length; False if answers differ."""
    import torch

    maps = tuple(dict.fromkeys(recipe.map for recipe in RECIPES.values()))
    all_heads_LN = jnp.ones((model.cfg.num_layers, model.cfg.num_heads), bool)
    evaluate = functools.partial(
        measure.evaluate, model.params, heads_LN=all_heads_LN, cfg=model.cfg, maps=maps
    )
    of_prompts = list(batches(suite, batch_size))
    ours_in = [tuple(map(jnp.asarray, (b.tokens_BT, b.lengths_B, b.target_B))) for b in of_prompts]
    theirs_in = [torch.tensor(b.tokens_BT, dtype=torch.long) for b in of_prompts]
    theirs = RecipeModel(torch_llama.as_torch(model.cfg, model.params))

    def bias_of(recipe: Recipe) -> float:
        return resolve_bias(recipe, {"auto": bias})

    def run_ours() -> list[jax.Array]:
        return jax.block_until_ready(
            [
                evaluate(*batch, jnp.int32(maps.index(r.map)), jnp.float32(bias_of(r)))["predicted"]
                for r in RECIPES.values()
                for batch in ours_in
            ]
        )

    def run_theirs() -> list[np.ndarray]:
        return [
            theirs(batch, r.map, bias_of(r)).numpy()
            for r in RECIPES.values()
            for batch in theirs_in
        ]

    start = time.perf_counter()
    ours = run_ours()
    first = time.perf_counter() - start
    valid = [b.valid_B for _ in RECIPES for b in of_prompts]
    equal = close = total = 0
    for predicted, logits_BV, valid_B in zip(ours, run_theirs(), valid, strict=True):
        ids_B = np.asarray(predicted)
        own_B = np.take_along_axis(logits_BV, ids_B[:, None], 1)[:, 0]
        equal += int((ids_B == logits_BV.argmax(1))[valid_B].sum())
        close += int((logits_BV.max(1) - own_B <= TIE)[valid_B].sum())
        total += int(valid_B.sum())
    label = (
        f"{len(RECIPES)} recipes x {len(suite.prompts)} prompts of {len(suite.prompts[0].tokens)} "
        f"tokens, {batch_size} at a time, ours / transformers with a hook"
    )
    if close < total:
        print(f"{label}: not timed, as {total - close} of {total} answers differ")
        return False
    pair = {"lm_jax": run_ours, "transformers": run_theirs}
    front.timed(label, pair, repeats, over="transformers")
    print(f"    {equal} of {total} answers equal, the others closer than {TIE} in their logits")
    print(f"    the first pass of ours, with compiling, took {first:.1f} s")
    return True


def run(arguments: argparse.Namespace, _: front.Record) -> bool:
    """Compares and times both; false where answers differ."""
    if reason := torch_llama.missing():
        print(f"ours / transformers: not measured, as {reason}")
        return True
    model = lm_jax.load_pretrained(arguments.model)
    if model.tokenizer is None:
        raise BadInputError("--model has no tokenizer.json; name a model that has one")
    suite = niah(
        model.tokenizer, haystack=corpora.essays(), length=arguments.length, n=arguments.prompts
    )
    print(f"{arguments.model}, float32\n")
    return against_hooks(model, suite, arguments.batch, arguments.bias, arguments.repeats)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = front.parser("bench.recipes", __doc__, repeats=5, kept=False)
    parser.add_argument("--model", default="smollm2", help="HF folder, GGUF file, or manifest name")
    parser.add_argument("--prompts", type=int, default=20, help="needle prompts")
    parser.add_argument("--length", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--bias", type=float, default=0.403, help="for recipes with b=auto")
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
