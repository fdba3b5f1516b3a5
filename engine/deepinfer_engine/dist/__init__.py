"""Ranks and expert slots: where a token's experts live and how its rows get there and back."""
