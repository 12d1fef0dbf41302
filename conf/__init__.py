"""The Hydra configuration of the recipes; installed as `pipeback.conf`."""
