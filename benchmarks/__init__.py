"""Benchmarks of chunked_head and its peers: time, memory and accuracy."""
