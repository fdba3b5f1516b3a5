"""Operations of the engine: specifications, the plain torch reference of each, faster implementations beside it."""
