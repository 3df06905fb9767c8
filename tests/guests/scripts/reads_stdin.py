"""A script whose rank 0 asks a question on standard input; without an answer it takes the default."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
answer = torch.zeros(1)
if dist.get_rank() == 0:
    line = sys.stdin.readline()
    answer += float(line) if line.strip() else 7.0
dist.broadcast(answer, 0)
(Path(sys.argv[1]) / f"rank-{dist.get_rank()}").write_text(
    f"{dist.get_world_size()} {answer.item()}"
)
dist.destroy_process_group()
