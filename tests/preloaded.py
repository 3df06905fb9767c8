"""What the server of forked ranks imports once, before it forks: ranks would import it one by one."""

from __future__ import annotations

import gc
import importlib

gc.disable()
for name in (
    "pytest",
    "torch._dynamo",
    "torch.utils.data",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "paceline.runtime.session",
    "paceline.runtime.start",
    "paceline.runtime.checkpoint.manager",
    "paceline.runtime.proof.patches",
    "paceline.runtime.training.ddp",
    "paceline.runtime.training.fsdp",
    "paceline.runtime.training.wrap",
    # what the modules of tests import: a rank imports one before it can call its function
    "numpy",
    "paceline.agent.health.heartbeat",
    "paceline.launch.submission",
    "paceline.tools.prove.local_runner",
    "paceline.runtime.data.evaluation",
    "paceline.runtime.data.stream_loader",
    "tests.forked_ranks",
    "tests.runtime.models",
    "tests.runtime.training.test_wrap",
):
    importlib.import_module(name)
gc.freeze()  # no collection in a rank copies the pages of these objects
gc.enable()
