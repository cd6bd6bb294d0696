"""Functions of (score, b, h, q, k) in the place of score terms, as FlexAttention's ``score_mod``."""
