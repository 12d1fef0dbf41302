"""The sections of `pipeback bench`, one a file."""
