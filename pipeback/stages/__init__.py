"""The stages: module, weights, optimizer and micro-batches in flight of one stage, and what serves several at once.

Floor 3. It may import methods, splitting's segment and tensors; stores and stacks come in as protocols (`home`).
"""
