"""The splitting: how any model becomes stages, by its sequence, by declaration, as a known family, or followed.

Floor 2. It may import tensors.
"""
