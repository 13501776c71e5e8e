"""Benchmarks of chunked_head beside its peers: time, memory and accuracy."""
