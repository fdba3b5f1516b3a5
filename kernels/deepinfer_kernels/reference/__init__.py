"""Plain torch oracle of every operation, one family per file. Imports nothing but torch.

Every function takes a ``Numerics`` first and is otherwise stateless. Shapes use the repository's letters.
"""
