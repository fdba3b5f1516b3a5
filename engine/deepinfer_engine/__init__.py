"""The embedded inference engine for DeepSeek-V4.1-Flash-class models."""

__version__ = "0.1.0"
