"""What trains differently on several ranks, or hangs: a remark says so, and none says it where it is not so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.adopt import rank_dependent_values
from paceline.tools.adopt.script_changes import advise
from paceline.tools.adopt.source_edits import Source, read_source

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Linear(1, 1).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, drop_last=True)
valid = DataLoader(data, batch_size=8)
"""
LOOP = """\
for epoch in range(5):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    with torch.no_grad():
        for x, y in valid:
            loss = F.mse_loss(model(x), y)
        score = sum(F.mse_loss(model(x), y).item() for x, y in valid)
"""


def musts(text: str) -> list[tuple[str, str]]:
    """Return the lines of what must be changed, as they were, and the first words about it."""
    advice = advise(Source(text, "train.py"))
    return [
        (text.split("\n")[each.line - 1].strip(), each.text[:16])
        for each in advice.remarks
        if each.must
    ]


def test_a_plain_script_has_none() -> None:
    assert musts(HEAD + LOOP) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("if total < 0.1:\n        break", True),
        ("mean = total / len(loader)\n    if mean < 0.1:\n        break", True),
        ("if stopper.step(total):\n        break", True),
        ("stopper(total)\n    if stopper.stop:\n        break", True),
        ("if score < 0.1:\n        break", False),  # all ranks evaluate the same
        ("if loss < 0.1:\n        break", False),  # of the evaluation
        ("if epoch > 3:\n        break", False),
        ("if total < 0.1:\n        print(total)", False),
        ("if reduce_mean(total) < 0.1:\n        break", False),
    ],
)
def test_ranks_that_stop_by_their_own_loss(line: str, found: bool) -> None:
    test = next(each.strip() for each in line.split("\n") if each.strip().startswith("if "))
    expected = [(test, "each rank decide")] if found else []
    assert musts(f"{HEAD}stopper = Stopper()\n{LOOP}    {line}\n") == expected


def test_steps_that_a_rank_leaves_out() -> None:
    for test, found in {
        "torch.isnan(loss)": True,
        "not math.isfinite(loss.item())": True,
        "i > 100": False,
    }.items():
        text = LOOP.replace(
            "        opt.zero_grad()\n",
            f"        if {test}:\n            continue\n        opt.zero_grad()\n",
        )
        assert musts(HEAD + text) == ([(f"if {test}:", "each rank decide")] if found else [])


def test_a_loss_of_a_function() -> None:
    text = """\
def train():
    total = 0.0
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    return total

def evaluate():
    return sum(F.mse_loss(model(x), y).item() for x, y in valid)

for epoch in range(5):
    WHAT = train()
    score = evaluate()
    if trained < 0.1:
        break
"""
    assert musts(HEAD + text.replace("WHAT", "trained")) == [
        ("if trained < 0.1:", "each rank decide")
    ]
    assert musts(HEAD + text.replace("WHAT", "_").replace("if trained", "if score")) == []


def test_a_loss_of_a_generator() -> None:
    text = """\
def train():
    for epoch in range(5):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        yield epoch, loss.item()

for epoch, last in train():
    if last < 0.1:
        break
"""
    assert musts(HEAD + text) == [("if last < 0.1:", "each rank decide")]


@pytest.mark.parametrize(("value", "found"), [("total", True), ("score", False)])
def test_plateaus(value: str, found: bool) -> None:
    text = (
        HEAD
        + "sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)\n"
        + LOOP
        + f"    sched.step({value})\n"
    )
    assert musts(text) == ([(f"sched.step({value})", "each rank lowers")] if found else [])


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ('F.mse_loss(model(x), y, reduction="sum")', True),
        ("criterion(model(x), y)", True),
        ("(model(x) - y).square().sum()", True),
        ("0.5 * torch.sum((model(x) - y) ** 2) + 1", True),
        ("vae_loss(model(x), y)", True),
        ("(model(x) - y).square().sum() / len(x)", False),
        ("(model(x) - y).square().sum(1).mean()", False),
        (
            "F.mse_loss(model(x), y) + 1e-4 * sum(p.square().sum() for p in model.parameters())",
            False,
        ),
    ],
)
def test_losses_that_are_sums(loss: str, found: bool) -> None:
    head = (
        HEAD
        + 'criterion = nn.MSELoss(reduction="sum")\ndef vae_loss(a, b):\n    return torch.sum((a - b) ** 2)\n'
    )
    remarks = musts(
        head
        + LOOP.replace(
            "        loss = F.mse_loss(model(x), y)\n        opt",
            f"        loss = {loss}\n        opt",
        )
    )
    assert [words for _, words in remarks] == (["this loss is a s"] if found else [])


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("[w, *model.parameters()]", ["w"]),
        ("list(model.parameters()) + [w, z]", ["w", "z"]),
        ('[{"params": model.parameters()}, {"params": [w], "lr": 0.5}]', ["w"]),
        ("groups", ["w"]),
        ("[model.weight, model.bias, *model.parameters()]", []),
        ("[p for p in model.parameters() if p.requires_grad]", []),
    ],
)
def test_parameters_of_no_model(parameters: str, names: list[str]) -> None:
    tensors = "w = nn.Parameter(torch.zeros(1))\nz = torch.zeros(1, requires_grad=True)\n"
    head = HEAD.replace("model.parameters(), lr", f"{parameters}, lr")
    head = head.replace("opt = ", f"{tensors}groups = [w, *model.parameters()]\nopt = ")
    advice = advise(Source(head + LOOP, "train.py"))
    assert [
        each.text.split("`")[1] for each in advice.remarks if "is not part of a model" in each.text
    ] == names


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mean = total / len(loader.dataset)", True),
        ("total /= len(data)", True),
        ("mean = total / len(loader)", False),
        ("mean = score / len(valid.dataset)", False),
    ],
)
def test_totals_of_one_rank_over_all_samples(line: str, found: bool) -> None:
    text = (
        HEAD.replace("torch.manual_seed(0)\n", "torch.manual_seed(0)\ndata = make()\n")
        + LOOP
        + f"    {line}\n"
    )
    assert musts(text) == ([(line, "this divides a t")] if found else [])


def test_what_rank_zero_prints_of_itself() -> None:
    advice = advise(
        Source(
            HEAD + LOOP + '    print("loss", total)\n    print(score)\n    print(f"{total}")\n',
            "train.py",
        )
    )
    (remark,) = [each for each in advice.remarks if "only rank 0's values" in each.text]
    assert (remark.line, "also in line 26" in remark.text, remark.must) == (24, True, False)


def test_scripts_with_ddp_have_them_as_well() -> None:
    head = HEAD.replace(
        "opt = ",
        'torch.distributed.init_process_group("gloo")\n'
        "model = nn.parallel.DistributedDataParallel(model)\nopt = ",
    )
    head = head.replace(
        "drop_last=True", "sampler=torch.utils.data.DistributedSampler(data, shuffle=False)"
    )
    stop = "    if total < 0.1:\n        break\n"
    assert musts(head + LOOP + stop) == [("if total < 0.1:", "each rank decide")]
    reduced = "    total = torch.tensor(total)\n    torch.distributed.all_reduce(total)\n"
    assert musts(head + LOOP + reduced + stop) == []
    assert "None needed" in advise(Source(head + LOOP + reduced + stop, "train.py")).verdict


def test_each_statement_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each name that is read would take minutes for thousands of lines."""
    searched: list[ast.AST] = []
    search = rank_dependent_values._given

    def counted(node: ast.AST) -> dict[str, list[ast.AST]]:
        searched.append(node)
        return search(node)

    monkeypatch.setattr(rank_dependent_values, "_given", counted)
    body = "".join(f"        a{n} = loss * {n}\n        print(a{n})\n" for n in range(20))
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\nmodel = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nfor epoch in range(2):\n"
        "    for x in DataLoader(data, 2):\n        loss = model(x).mean()\n        loss.backward()\n"
    )
    advise(Source(text + body, "train.py"))
    assert len(searched) > 20
    assert len(searched) == len(set(searched))


def test_a_huge_script_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\n" * 100_000)
    with pytest.raises(UsageError, match="too large for a script"):
        read_source(script)
