"""The old path of `pipeback.methods.base`, for one release."""

from pipeback.methods.base import *  # noqa: F403
