"""The head in Triton kernels, one file for each way of keeping the logits."""
