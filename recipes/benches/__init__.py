"""The sections of `pipeback bench`, one per file."""
