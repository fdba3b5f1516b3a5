"""Checkpoints: the expected tensors of a config, header validation, reading and writing the official format."""
