"""The old path of `pipeback.methods.momentum`, for one release."""

from pipeback.methods.momentum import *  # noqa: F403
