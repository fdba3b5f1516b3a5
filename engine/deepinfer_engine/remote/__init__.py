"""Talking to other engines over HTTP: one client for evaluation, judging and measuring."""
