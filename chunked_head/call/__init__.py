"""The run of a call: its Spec and Tokens, the loop over chunks, the autograd Function."""
