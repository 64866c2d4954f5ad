"""Settings of `iaj polyattn audit`; the fields and their bounds are those of `AuditConfig`."""

import dataclasses

from lm_jax.study import Distributed
from polyattn_jax.audit.config import MODES, AuditConfig


@dataclasses.dataclass(frozen=True)
class AuditSettings(AuditConfig, Distributed):
    """Everything that decides the result of an audit."""

    model: str = "smollm2"


def quickstart(config: AuditSettings) -> AuditSettings:
    """An audit that two CPU cores finish within minutes on a model of 135 M parameters."""
    return dataclasses.replace(config, **MODES["quickstart"])


def smoke(config: AuditSettings) -> AuditSettings:
    """An audit that only shows that everything runs."""
    return dataclasses.replace(config, **MODES["smoke"])
