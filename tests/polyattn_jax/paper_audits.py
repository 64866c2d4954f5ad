"""Audits beside a model of the paper, of the numbers in a synthetic summary."""

from polyattn_jax.report import paper
from polyattn_jax.report.beside import Audit

LLAMA = paper.MODELS[0]


def audit_of(finding, result=None, *, beside=LLAMA, same=False):
    summary, _, by_head = finding
    return Audit(result or summary, by_head, beside, same)
