"""The old path of `pipeback.streaming.disk_store`, for one release."""

from pipeback.streaming.disk_store import *  # noqa: F403
