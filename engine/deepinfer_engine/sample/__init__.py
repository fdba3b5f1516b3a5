"""From logits to tokens, and from tokens to where an answer ends."""
