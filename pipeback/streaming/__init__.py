"""The streaming: weights that live outside the device, in host memory, on disk, sparse, or shared out over replicas.

Floor 5. It may import runtime, stages, methods, sparsities, schedules and tensors.
"""
