"""Offline batches: a file of requests in, a file of answers out, resumable."""
