"""Losses that scripts print: read soundly, or not at all."""

from __future__ import annotations

import math

import pytest

from paceline.errors import RunError
from paceline.tools.prove.records import read_printed


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("epoch 3 lr 0.001 loss: 1.23e-2", 0.0123),
        ("step 7 loss 0.5 val_loss 0.7 val loss 0.8", 0.5),
        ("Epoch [3/10], Loss: 0.6931, Acc: 12.5%", 0.6931),
        ("{'loss': 2.5, 'grad_norm': 1.25, 'epoch': 0.1}", 2.5),
        ('{"step": 3, "loss": -1.5}', -1.5),
        ("loss=tensor(0.25, grad_fn=<NllLossBackward0>)", 0.25),
        ("train loss 0.5 | best loss 0.4", 0.5),
        ("loss is 0.5.", 0.5),
        ("loss 0.5, loss 0.5", 0.5),
        ("10%|#  | 1/10 [loss=0.9]\r20%|## | 2/10 [loss=0.8]\r", 0.8),
        ("loss inf", math.inf),
    ],
)
def test_a_line_has_a_loss(line: str, value: float) -> None:
    assert read_printed(f"begin\n{line}\n", "loss") == {1: value}


@pytest.mark.parametrize(
    "line",
    [
        "val_loss 0.5",
        "val loss: 0.5",
        "Test Loss = 0.5",
        "best_loss: 0.5",
        "eval/loss 0.5",
        "loss_scale: 65536",
        "loss scale 65536",
        "lossless 3",
        "loss 12/100",
        "loss 1.25/3",
        "loss 1,234.5",
        "loss 12%",
        "loss curve in 3.svg",
        "average loss 0.5",
    ],
)
def test_a_line_has_no_loss(line: str) -> None:
    assert read_printed(f"{line}\n", "loss") == {}


def test_a_loss_that_is_not_a_number_is_one() -> None:
    assert math.isnan(read_printed("step 1 loss=nan\n", "loss")[1])


def test_a_name_in_full_is_read() -> None:
    text = "train loss 0.5, val loss 0.7\n"
    assert read_printed(text, "val loss") == {1: 0.7}
    assert read_printed("loss 0.5 val_loss 0.7\n", "val_loss") == {1: 0.7}
    assert read_printed(text, "loss") == {1: 0.5}


def test_several_values_in_one_line_are_an_error() -> None:
    with pytest.raises(RunError, match=r"several values of 'loss': loss 0\.5 loss 0\.7"):
        read_printed("loss 0.5 loss 0.7\n", "loss")
