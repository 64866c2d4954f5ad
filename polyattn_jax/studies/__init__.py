"""Commands: audit, check, hybrid search, distillation, the paper's tables."""
