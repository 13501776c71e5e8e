"""The arithmetic of losses and metrics: it makes their values and the coefficients of gradients from statistics."""
