"""What runs: the loop over chunks, the autograd Functions and what they are given."""
