"""Loops over epochs and steps: the same epochs as before, and a resume only where it is right."""

from __future__ import annotations

import pytest

from paceline.tools.adopt.script_changes import Advice, advise
from paceline.tools.adopt.source_edits import Source

HEAD = """\
import copy
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

torch.manual_seed(0)
model = torch.nn.Linear(1, 1).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, drop_last=True)
"""
STEPS = """\
    for x in loader:
        loss = model(x.cuda()).mean()
        loss.backward()
        opt.step()
"""


def adopt(end: str) -> tuple[list[str], Advice]:
    """Return the lines that follow the loader in the adopted script, and all advice."""
    advice = advise(Source(HEAD + end, "train.py"))
    lines = advice.text.splitlines()
    return lines[
        next(n for n, line in enumerate(lines) if line.startswith("loader = ")) + 1 :
    ], advice


RESUME = "run.resume(model=model, opt=opt, loader=loader)"


@pytest.mark.parametrize(
    ("loop", "changed"),
    [
        ("for epoch in range(5):", ["for epoch in run.epochs(5):"]),
        ("for epoch in tqdm(range(0, n)):", ["for epoch in tqdm(run.epochs(n)):"]),
        ("for _ in range(1, n + 1):", ["for _ in run.epochs(n):"]),
        (
            "for state.epoch in range(1, n + 1):",
            ["for state.epoch in run.epochs(n):", "    state.epoch += 1"],
        ),
    ],
)
def test_epochs_stay_what_they_were(loop: str, changed: list[str]) -> None:
    lines, _ = adopt(f"{loop}\n{STEPS}")
    assert lines[: 1 + len(changed)] == [RESUME, *changed]


def test_epochs_from_one_that_are_read_after_the_loop() -> None:
    lines, _ = adopt(f"for epoch in range(1, 4):\n{STEPS}name = epoch\n")
    assert lines[1:3] == ["for epoch in run.epochs(3):", "    epoch += 1"]


@pytest.mark.parametrize(
    "loop",
    [
        "for epoch in range(start, n):",
        "for epoch in range(2, n):",
        "for epoch in range(0, n, 2):",
        "for epoch in list(range(n)):",
        "for epoch, rate in zip(range(n), rates):",
        "for epoch in schedule:",
        "while epoch < n:",
    ],
)
def test_without_counted_epochs_nothing_is_resumed(loop: str) -> None:
    """A run that loads its weights must not begin with the first epoch again."""
    lines, advice = adopt(f"{loop}\n{STEPS}")
    assert lines[0] == loop
    assert not any("run.resume(" in line for line in lines)
    assert [each.line for each in advice.remarks if "nothing is resumed" in each.text] == [
        HEAD.count("\n") + 1
    ]


def test_two_loops_over_epochs_stay() -> None:
    """`run.epochs` counts all epochs of a run, so a second loop would have too few."""
    phases = f"for epoch in range(2):\n{STEPS}for epoch in range(3):\n{STEPS}"
    twice = "def fit(n):\n" + "".join(
        f"    {line}\n" for line in f"for epoch in range(n):\n{STEPS}".splitlines()
    )
    for text in (phases, f"{twice}fit(2)\nfit(3)\n"):
        lines, advice = adopt(text)
        assert not any("run.epochs" in line or "run.resume" in line for line in lines)
        assert any("nothing is resumed" in each.text for each in advice.remarks)


def test_a_method_named_as_one_of_a_module() -> None:
    """`self.model.train()` is not the `train` of the trainer, which runs once."""
    text = """\
class Trainer:
    def __init__(self, model):
        self.model = model

    def train(self):
        for epoch in range(5):
            self.model.train()
            for x in loader:
                loss = self.model(x.cuda()).mean()
                loss.backward()
                opt.step()

Trainer(model).train()
"""
    lines, _ = adopt(text)
    assert any("run.epochs(5)" in line for line in lines)


def test_a_list_of_all_batches() -> None:
    lines, advice = adopt(
        "for epoch in range(2):\n" + STEPS.replace("in loader", "in list(loader)")
    )
    assert "    for x in list(loader):" in lines
    assert any(each.must and "before the first step" in each.text for each in advice.remarks)


def test_progress_bars() -> None:
    """A bar that is made once is read in each epoch, but `run.steps` only once."""
    inside = "    with tqdm(loader, unit='batch') as bar:\n        for x in bar:\n"
    body = "".join(f"    {line}\n" for line in STEPS.splitlines()[1:])
    lines, advice = adopt(f"for epoch in range(2):\n{inside}{body}")
    assert "    with tqdm(run.steps(loader), unit='batch') as bar:" in lines
    assert not any(each.must for each in advice.remarks)
    lines, advice = adopt(
        "bar = tqdm(loader)\nfor epoch in range(2):\n" + STEPS.replace("in loader", "in bar")
    )
    assert "bar = tqdm(loader)" in lines
    assert [each.line for each in advice.remarks if each.must] == [HEAD.count("\n") + 1]


def test_a_loop_that_trains_and_evaluates() -> None:
    text = """\
loaders = {phase: DataLoader(data, batch_size=8) for phase in ("train", "valid")}
for epoch in range(2):
    for phase in ("train", "valid"):
        for x in loaders[phase]:
            loss = model(x.cuda()).mean()
            if phase == "train":
                loss.backward()
                opt.step()
"""
    lines, advice = adopt(text)
    assert lines == [each.replace("x.cuda()", "x.to(run.device)") for each in text.splitlines()]
    assert [each.line - HEAD.count("\n") for each in advice.remarks if each.must] == [1, 4]


def test_models_of_a_comprehension() -> None:
    text = (
        "opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model,)]\nfor epoch in range(2):\n"
        + STEPS
    )
    lines, advice = adopt(text)
    assert not any("run.wrap(m)" in line for line in lines)
    assert any(
        "run.wrap must get each of these" in each.text for each in advice.remarks if each.must
    )


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("", "print(loss)", "loss"),
        ("", "print(loss, x)", "loss, x"),
        ("loss = None", "print(loss)", ""),
        ("", "loss = 0\n    print(loss)", ""),
        ("", "print([x for x in range(3)], (lambda loss: loss)(1))", ""),
        ("", "pass", ""),
    ],
)
def test_variables_that_only_the_loop_assigns_are_named(
    before: str, after: str, named: str
) -> None:
    """After a resume at the end of an epoch they don't exist."""
    _, advice = adopt(f"for epoch in range(5):\n    {before or 'pass'}\n{STEPS}    {after}\n")
    found = [each for each in advice.remarks if "Assign a value before the loop" in each.text]
    assert [each.must for each in found] == ([False] if named else [])
    assert all(f"assigns {named}: a run that resumes" in each.text for each in found)


def test_copies_of_the_model_are_saved_and_variables_named() -> None:
    text = (
        "ema = copy.deepcopy(model)\nbest, bad, history = float('inf'), 0, []\nlr = 0.1\n"
        f"for epoch in range(5):\n    total = 0.0\n{STEPS}        total += loss.item()\n"
        "    history.append(total)\n    if total < best:\n        best = total\n    else:\n        bad += 1\n"
    )
    lines, advice = adopt(text)
    assert "run.resume(model=model, opt=opt, ema=ema, loader=loader)" in lines
    (remark,) = [each for each in advice.remarks if "a resumed run resets" in each.text]
    assert all(f"{name} (line 11)" in remark.text for name in ("best", "bad", "history"))
    assert "total" not in remark.text


def test_a_copy_of_a_model_that_moves() -> None:
    """`run.wrap` moves the model to the GPU of the rank, and in a script without devices nothing moves a copy of it."""
    head, loop = (
        HEAD.replace(".cuda()", ""),
        "for epoch in range(2):\n" + STEPS.replace(".cuda()", ""),
    )
    copied = head.replace("opt = ", "ema = copy.deepcopy(model)\nopt = ")
    musts = [
        [each.line for each in advise(Source(text + loop)).remarks if each.must]
        for text in (copied, head)
    ]
    assert musts == [[8], []]


def test_closures() -> None:
    text = """\
for x in loader:
    def closure():
        opt.zero_grad()
        loss = model(x.cuda()).mean()
        loss.backward()
        return loss
    opt.step(closure)
"""
    lines, advice = adopt(text.replace("SGD", "LBFGS"))
    assert "        run.backward(loss)" in lines
    assert lines[-1] == "    run.update(opt, closure=closure)"
    assert not any(each.must for each in advice.remarks)
    _, advice = adopt(text.replace("    opt.step", "    last = opt.step"))
    assert any(
        "run.update(optimizer, closure=closure)" in each.text
        for each in advice.remarks
        if each.must
    )


@pytest.mark.parametrize(("first", "told"), [("start", False), ("0", True)])
def test_a_load_is_replaced_only_if_the_run_resumes(first: str, told: bool) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\nmodel = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = DataLoader(data, 2, drop_last=True)\n"
        'start = torch.load("a.pt")["epoch"]\n'
        f"for epoch in range({first}, 9):\n    for x in loader:\n        loss = model(x).mean()\n"
        "        loss.backward()\n        opt.step()\n"
    )
    advice = advise(Source(text, "train.py"))
    assert ("run.resume(" in advice.text) is told
    assert any("run.resume does that" in each.text for each in advice.remarks) is told
