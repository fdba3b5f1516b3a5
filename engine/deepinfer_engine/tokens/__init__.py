"""Text to token ids and back: the checkpoint's tokenizer, the chat codec, the detokeniser, the Engram classes."""
