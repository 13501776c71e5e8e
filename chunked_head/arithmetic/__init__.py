"""From statistics to losses, metrics and coefficients, on vectors of tokens."""
