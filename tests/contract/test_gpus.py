"""Which GPUs the environment shows."""

from __future__ import annotations

import pytest

from paceline.contract.gpus import visible_devices


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0, 2"}, ["0", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f,-1,3"}, ["GPU-1f"]),
        ({"ROCR_VISIBLE_DEVICES": "4"}, ["4"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,5"}, ["1"]),
    ],
)
def test_visible_devices(environ: dict[str, str], devices: list[str] | None) -> None:
    assert visible_devices(environ) == devices
