"""Planning and simulation of deployments: what fits, how fast it may be, and how pools behave on a trace. No torch."""
