"""Checks of the engine against itself and against recorded vectors."""
