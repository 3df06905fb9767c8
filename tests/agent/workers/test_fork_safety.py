"""What the text of a script shows about forking it."""

from __future__ import annotations

import pytest

from paceline.agent.workers.fork_safety import modules_to_preload, variable_set_before_torch


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", "OMP_NUM_THREADS"),
        (
            "import os\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', '0')\nimport torch",
            "CUDA_VISIBLE_DEVICES",
        ),
        ("import os\nos.putenv('MKL_NUM_THREADS', '1')\nfrom torch import nn", "MKL_NUM_THREADS"),
        ("from os import environ\nenviron['TORCH_LOGS'] = 'x'\nimport torch", "TORCH_LOGS"),
        (
            "import os\nos.environ.update({'A': '1', 'KMP_AFFINITY': 'x'})\nimport torch",
            "KMP_AFFINITY",
        ),
        ("import os\nos.environ.update(OMP_SCHEDULE='x')\nimport torch", "OMP_SCHEDULE"),
        ("import os\nif True:\n    os.environ['OMP_X'] = '1'\nimport torch", "OMP_X"),
        (
            "import os\ntry:\n    pass\nexcept ValueError:\n    os.environ['OMP_X'] = '1'\nimport torch",
            "OMP_X",
        ),
        (
            "import os\nos.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\nimport torch",
            "TORCHINDUCTOR_MAX_AUTOTUNE",
        ),
        ("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'\nimport torch", None),
        ("import os\nos.environ['PYTHONHASHSEED'] = '0'\nimport torch", None),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'", None),
        ("import os\nos.environ['MY_OWN'] = '1'\nimport torch", None),
        ("import os\nos.environ[name] = '1'\nimport torch", None),
        ("import os\ndef later():\n    os.environ['OMP_X'] = '1'\nimport torch", None),
        ("if os.environ['OMP_X'] == '1': pass\nimport torch", None),
        ("this is no python: environ", None),
        ("", None),
    ],
)
def test_variables_set_before_torch_are_found(source: str, name: str | None) -> None:
    assert variable_set_before_torch(source) == name


def test_modules_to_preload() -> None:
    assert modules_to_preload("import torch\nprint(1)") == []
    assert modules_to_preload("torch.optim.AdamW(...)") == ["torch._dynamo"]
    assert "paceline.runtime.session" in modules_to_preload("import paceline")
