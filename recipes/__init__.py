"""The command line of pipeback, and what it runs; installed as `pipeback.recipes`."""
