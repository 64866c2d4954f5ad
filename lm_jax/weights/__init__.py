"""Pretrained weights and tokenizers: Hugging Face folders, GGUF files, families as tables."""
