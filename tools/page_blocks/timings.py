"""Tables of training steps, forward passes and decoding (`tools.bench.train`)."""

import statistics
from typing import Any

from tools.bench.timing import ratio
from tools.page_blocks.sources import MODELS, published, summary, table


def _median(seconds: list[float]) -> str:
    value = statistics.median(seconds)
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value:.3f} s"
        if value >= 0.1
        else f"{1e3 * value:.1f} ms"
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def first_steps(cpu: str, gpu: str) -> str:
    """A training step at the default size on a CPU and on a GPU, beside the paper's rates."""
    steps, on_gpu = summary(cpu)["step"]["seconds"], summary(gpu)["step"]
    rows = []
    for model, label in MODELS.items():
        seconds = on_gpu["seconds"][model]
        rows.append(
            (
                label,
                _median(steps[model]) if model in steps else "",
                _of(steps, model),
                _median(seconds),
                _of(on_gpu["seconds"], model),
                _mebibytes(on_gpu["temporary_bytes"][model]),
                f"{1 / statistics.median(seconds):.0f}",
                f"{published('protot')['table_13'][model]['steps_per_second'][0]:g}",
            )
        )
    return table(
        (
            "a training step",
            "two CPU cores",
            "of ProtoT's time",
            "one H200",
            "of ProtoT's time",
            "temporary memory, H200",
            "steps/s, H200",
            "the paper's, its GPU (Table 13: 12.2 M parameters, untied)",
        ),
        rows,
    )


def _of(seconds: dict[str, list[float]], model: str, suffix: str = "") -> str:
    if model not in ("protot",) and f"{model}{suffix}" in seconds:
        return str(ratio(seconds[f"{model}{suffix}"], seconds[f"protot{suffix}"]))
    return "1" if f"{model}{suffix}" in seconds else ""


def paper_steps(name: str) -> str:
    """A training step of the models of Table 13 at both of its batch sizes."""
    found = summary(name)
    seconds, paper = found["step"]["seconds"], published("protot")["table_13"]
    rows = []
    for model, label in MODELS.items():
        count = f"{found['parameters'][model]:,}"
        rates = paper[model]["steps_per_second"]
        base = paper["protot"]["steps_per_second"]
        rows.append(
            (
                f"{label}, {count} parameters" if model == "protot" else f"{label}, {count}",
                *(
                    cell
                    for batch in (32, 128)
                    for cell in (
                        _median(seconds[f"{model}, batch {batch}"]),
                        _of(seconds, model, f", batch {batch}"),
                    )
                ),
                _mebibytes(found["step"]["temporary_bytes"][f"{model}, batch 128"]),
                f"{rates[0]:g} and {rates[1]:g} a second"
                if model == "protot"
                else " and ".join(f"{b / r:.2f}" for b, r in zip(base, rates, strict=True)),
            )
        )
    return table(
        (
            "a training step",
            "batch 32",
            "of ProtoT's time",
            "batch 128",
            "of ProtoT's time",
            "temporary memory at 128",
            "the paper's rates at 32 and 128, of its ProtoT's time",
        ),
        rows,
    )


def forward_passes(name: str) -> tuple[dict[str, Any], str]:
    """Seconds of forward passes by length and model, and of which logits they are."""
    found = summary(name)
    if "forward_all_logits" in found:
        return found["forward_all_logits"], "all logits"
    # Older results have the logits of the last position alone.
    return found["forward"], "without the head"


def gpu_forward(name: str) -> str:
    """Forward passes by length, each model's time over ProtoT's, beside Table 14."""
    forward, logits = forward_passes(name)
    paper = published("protot")["table_14"]
    rows = []
    for length, seconds in forward.items():
        rates = paper[length]
        rows.append(
            (
                f"{int(length):,} tokens" if not rows else f"{int(length):,}",
                f"{1e3 * statistics.median(seconds['protot']):.2f} ms",
                *(
                    str(ratio(seconds[key], seconds["protot"]))
                    for key in ("llama", "llama, cuDNN", "mamba", "deltanet")
                ),
                ", ".join(
                    f"{rates['protot'] / rates[model]:.2f}"
                    for model in ("llama", "mamba", "deltanet")
                ),
            )
        )
    return table(
        (
            f"forward, H200, bfloat16, {logits}",
            "ProtoT",
            "LLaMA",
            "LLaMA, cuDNN",
            "Mamba",
            "DeltaNet",
            "the paper's LLaMA, Mamba, DeltaNet, H100, torch without compilation",
        ),
        rows,
    )


def cpu_forward(name: str) -> str:
    """Forward passes by length on a CPU, each model's time over ProtoT's."""
    forward, logits = forward_passes(name)
    others = [
        model for model in MODELS if model != "protot" and model in next(iter(forward.values()))
    ]
    return table(
        (f"forward, batch 1, on a CPU, {logits}", "ProtoT", *(MODELS[model] for model in others)),
        (
            (
                f"{int(length):,} tokens",
                _median(seconds["protot"]),
                *(str(ratio(seconds[model], seconds["protot"])) for model in others),
            )
            for length, seconds in forward.items()
        ),
    )


def cpu_decoding(name: str) -> str:
    """Tokens a second after prompts of several lengths, and the size of the cache."""
    decode: dict[str, Any] = summary(name)["decode"]
    models = [model for model in MODELS if model in decode]
    lengths = list(decode[models[0]]["tokens_per_second"])
    first, last = lengths[0], lengths[-1]
    rates = {model: decode[model]["tokens_per_second"] for model in models}
    caches = {model: decode[model]["cache_bytes"] for model in models}
    rows = [
        (f"{int(length):,} tokens", *(f"{statistics.median(rates[m][length]):.3g}" for m in models))
        for length in lengths
    ]
    rows.append(
        (
            f"{int(last):,}, of that after {int(first):,}",
            *(str(ratio(rates[model][last], rates[model][first])) for model in models),
        )
    )
    rows.append(
        (
            f"cache after {int(first):,} and {int(last):,}",
            *(
                " and ".join(f"{caches[m][length] / 1e6:.2f}" for length in (first, last)) + " MB"
                for m in models
            ),
        )
    )
    return table(("after", *(MODELS[model] for model in models)), rows)


def torch_steps(name: str) -> str:
    """A training step against torch's Llama, compiled and eager."""
    step = summary(name)["step"]
    seconds, memory = step["seconds"], step["temporary_bytes"]
    compiled, eager = "torch.compile llama", "torch llama"
    labels = {
        "protot, dropout 0": "our ProtoT",
        "llama, dropout 0": "our LLaMA",
        "protot, dropout 0.1": "our ProtoT, dropout 0.1",
        "llama, dropout 0.1": "our LLaMA, dropout 0.1, of the pattern too",
        compiled: "`LlamaForCausalLM`, `torch.compile`",
        eager: "`LlamaForCausalLM`, eager",
    }
    return table(
        (
            "training step",
            "seconds",
            "against torch's Llama under `torch.compile`",
            "against it eager",
            "temporary memory",
        ),
        (
            (
                label,
                f"{statistics.median(seconds[key]):.2f}",
                *(
                    str(ratio(seconds[other], seconds[key])) if key.endswith("dropout 0") else ""
                    for other in (compiled, eager)
                ),
                _mebibytes(memory[key]) if key in memory else "",
            )
            for key, label in labels.items()
        ),
    )


def graphs_beside_circuit_tracer(*names: str) -> str:
    """Seconds of graphs by both programs, of `tools.bench.graphs_tracer`, and their ratios.

    Args:
      *names: stored results.
    """
    rows = []
    for name in names:
        found = summary(name)["graphs"]
        for what in ("first", "later"):
            theirs = found[what]["circuit-tracer"]
            for ours, own in found[what].items():
                if ours == "circuit-tracer":
                    continue
                wall, cpu = (
                    str(ratio(*([each[clock] for each in x] for x in (theirs, own))))
                    for clock in ("wall", "cpu")
                )
                seconds = (_median([each["wall"] for each in x]) for x in (theirs, own))
                label = what if what == "later" else f"{what}{ours.removeprefix('ours')}"
                size = f"{found['tokens']} tokens, {found['features']:,} features"
                rows.append((size, label, *seconds, wall, cpu))
    heads = ("prompt", "graph", "circuit-tracer", "ours", "times as fast", "in CPU seconds")
    return table(heads, rows)
