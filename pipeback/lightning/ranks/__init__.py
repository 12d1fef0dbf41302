"""What several devices add to a fit under Lightning.

It may import lightning's files, of which `strategy` alone imports it.
"""
