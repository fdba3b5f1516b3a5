"""The ``deepinfer`` command. It never sees a tensor; ``--help`` imports neither torch nor pydantic."""
