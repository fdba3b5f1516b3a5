"""Operations on tensors: one specification and reference per operation, and implementations per backend."""
