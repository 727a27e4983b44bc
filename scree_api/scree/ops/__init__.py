"""Operations of `xp.ragged`, one module per operation; `scree.ragged` lists them."""
