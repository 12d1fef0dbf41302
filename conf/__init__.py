"""The Hydra configuration of the recipes; installed as `pipeback.conf`.

Hydra imports this package when it reads `pkg://pipeback.conf`, so the resolver is there for other applications too.
"""

from omegaconf import OmegaConf

# ${when:${quick},1,3}
OmegaConf.register_new_resolver("when", lambda test, yes, no: yes if test else no, replace=True)
