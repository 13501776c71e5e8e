"""The backend of Triton kernels, and the stores of what they write."""
