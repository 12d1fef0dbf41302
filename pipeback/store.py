"""The old path of `pipeback.streaming.store`, for one release."""

from pipeback.streaming.store import *  # noqa: F403
