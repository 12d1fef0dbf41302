"""The commands of pipeback and their parts; installed as `pipeback.recipes`."""
