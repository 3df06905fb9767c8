"""What the text of a program shows: whether it uses the runtime, and which framework it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.frameworks import PRESETS, imports_runtime, read_sources


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, paceline", True),
        ("def main():\n    from paceline.runtime import session", True),
        ('"""Run it with\nimport paceline\nor with torchrun."""  # paceline run', False),
        ("import paceline_tools\nfrom .paceline import x", False),
        ("import paceline (", False),
    ],
)
def test_only_an_import_means_that_a_script_uses_the_runtime(source: str, expected: bool) -> None:
    assert imports_runtime(source) is expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from transformers import Trainer, TrainingArguments", "Hugging Face Trainer"),
        ("import transformers\ntransformers.Seq2SeqTrainer()", "Hugging Face Trainer"),
        ("def main():\n    from trl import SFTTrainer", "Hugging Face Trainer"),
        ("import lightning as L\nL.Trainer().fit(model)", "Lightning Trainer"),
        ("from pytorch_lightning.cli import LightningCLI", "Lightning Trainer"),
        (
            "import lightning as L\nfrom transformers import AutoModel\nL.Trainer()",
            "Lightning Trainer",
        ),
        ("from transformers import AutoModel\nmodel.train()", None),
        ("from lightning.fabric import Fabric", None),
        ("from accelerate import Accelerator", None),
        ("class Trainer: '''As in transformers'''", None),
        ("from transformers import Trainer (", None),
    ],
)
def test_the_preset_of_a_program(source: str, name: str | None) -> None:
    found = next((each.name for each in PRESETS if each.fits(source)), None)
    assert found == name


def test_modules_of_the_project_count_too(tmp_path: Path) -> None:
    """Those beside a script, those of a package, and those that they import, but no others."""
    files = {
        "train.py": "import json, tools.loop\n",
        "tools/__init__.py": "",
        "tools/loop.py": "from . import model\nfrom .deep import net\nfrom ..outside import x\nimport train\n",
        "tools/model.py": "from transformers import Trainer\n",
        "tools/deep/net.py": "import broken\n",
        "broken.py": "import (\n",
        "other.py": "from lightning import Trainer\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = read_sources(str(tmp_path / "train.py"), is_module=False, import_path=[])
    assert sorted(found) == sorted(set(files.values()) - {files["other.py"]})
    as_module = read_sources("tools.loop", is_module=True, import_path=[str(tmp_path)])
    assert files["tools/model.py"] in as_module
    assert read_sources(str(tmp_path / "gone.py"), is_module=False, import_path=[]) == []
