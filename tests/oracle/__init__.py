"""The oracle: each loss on full logits, written for the eye rather than the machine."""
