"""Model configuration and deployment profiles. Nothing here imports torch."""
