"""The transports: wires in one direction between two ranks, over torch.distributed or shared memory.

It may import runtime's link and tensors.
"""
