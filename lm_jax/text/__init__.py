"""Text to tokens: tokenizers, corpora, their preparation, examples and batches."""
