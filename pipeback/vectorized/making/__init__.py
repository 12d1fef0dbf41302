"""Making: makes the graphs of a stack: compares each row with its stage, times several ways, and keeps the results.

It imports `tracing`, `steps` and `buffers`.
"""
