"""Turning plans into tensors and tensors into tokens."""
