"""The summary of an audit, of which `polyattn_jax.audit.results` declares every part."""

from polyattn_jax.audit.results import AuditSummary

__all__ = ["AuditSummary"]
