"""Speculation: how many drafts to verify, which drawn tokens to accept, how far to trust the confidence."""
