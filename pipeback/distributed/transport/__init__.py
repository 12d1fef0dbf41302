"""The transports: one direction between two ranks, over torch.distributed or memory that both share.

It may import runtime's link and tensors.
"""
