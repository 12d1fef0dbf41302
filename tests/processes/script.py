"""A user's script: python script.py FOLDER END KILLS, alone or under torchrun; killed at RANK:MICRO-BATCH,…

It knows nothing of ranks but for the kills: the same lines train in one process and over several.
"""

import os
import signal
import sys

import torch
from torch import nn

import pipeback

folder, end, kills = sys.argv[1:]
torch.manual_seed(3)
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(5)])
pipe = pipeback.Pipeline(
    model,
    loss=nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    method="cerebras",
    workers=pipeback.Processes(timeout=30.0),
)
begin = 0
if pipeback.checkpoint.latest(folder) is not None:
    begin = pipeback.checkpoint.load(pipe, folder)["step"]
    print(f"resumed from step-{begin:08d}", flush=True)

attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
plan = [tuple(map(int, kill.split(":"))) for kill in kills.split(",") if kill]
generator = torch.Generator().manual_seed(1)
batches = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(24)]
for step in range(begin, 24):
    if attempt < len(plan) and (pipe.ranks.index, step) == plan[attempt]:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.push(*batches[step])
    if (step + 1) % 4 == 0:
        pipeback.checkpoint.save(pipe, folder, facts={"step": step + 1})
weights = pipe.model.state_dict()
if pipe.ranks.index == 0:
    torch.save(weights, end)
