"""Logits that are computed only where somebody reads them."""
