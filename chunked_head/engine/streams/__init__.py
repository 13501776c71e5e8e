"""Several streams of hidden states through one head, whose gradient is accumulated once."""
