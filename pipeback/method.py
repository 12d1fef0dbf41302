"""The old path of `pipeback.methods.base` and `pipeback.methods.chain`, for one release."""

from pipeback.methods.base import *  # noqa: F403
from pipeback.methods.chain import chain as chain
