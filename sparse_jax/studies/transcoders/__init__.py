"""The command that trains a cross-layer transcoder and scores it."""
