"""The paper's ratings and BLEU of generated text (appendix B), for comparison."""

from collections.abc import Mapping

# Table 22, by the kind of model as `PretrainConfig.model` names it.
ELO: Mapping[str, float] = {
    "llama": 938.59,
    "mamba": 1150.78,
    "protot": 1015.93,
    "deltanet": 894.70,
}
# Appendix B.3: BLEU of each model at the prompt where it is highest.
BEST_BLEU: Mapping[str, float] = {
    "protot": 0.0359,
    "llama": 0.0228,
    "deltanet": 0.0143,
    "mamba": 0.0135,
}
