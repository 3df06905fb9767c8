"""The communication check over NCCL: it passes, and a network that does not answer is an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from paceline.errors import RunError
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.distributed.process_group import ProcessGroups, check_communication

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def group() -> Iterator[ProcessGroups]:
    """A group of one rank on NCCL; a session would create none."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield ProcessGroups(main=dist.group.WORLD, control=dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def test_the_check_passes(group: ProcessGroups) -> None:
    check_communication(group, read_identity(), DEVICE, timeout=60)


def test_an_unresponsive_device_is_named(group: ProcessGroups) -> None:
    torch.cuda._sleep(20_000_000_000)  # cycles: about ten seconds before the sum
    with pytest.raises(
        RunError, match=r"1 ranks over nccl failed: no answer within 0.5 s"
    ) as caught:
        check_communication(group, read_identity(), DEVICE, timeout=0.5)
    assert "NCCL_SOCKET_IFNAME" in caught.value.hint
    torch.cuda.synchronize()
