"""The V4.1 text model: a causal encoder and a decoder over one set of global keys."""
