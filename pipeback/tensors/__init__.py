"""The tensors: lists of weights, how they lie in memory, devices, and nested structures of them.

Floor 1. It knows no stage and no method, and imports only `private`.
"""
