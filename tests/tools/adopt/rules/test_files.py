"""Files that a script writes: one rank writes them, unless another rank needs what happens there."""

from __future__ import annotations

import pytest

from paceline.tools.adopt.script_changes import Advice, advise
from paceline.tools.adopt.source_edits import Source

SINGLE = """\
import io, json, os, pickle, tempfile
from pathlib import Path
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
history, low_rank, rank, X, loss = [], True, 4, torch.ones(1), None
for x in DataLoader(data, 2, drop_last=True):
    loss = model(x).mean()
    loss.backward()
    opt.step()
"""


def adopt_with(end: str) -> tuple[str, Advice]:
    """Return what becomes of lines at the end of a script."""
    advice = advise(Source(SINGLE + end, "train.py"))
    return advice.text[advice.text.index("    opt.step()\n") + len("    opt.step()\n") :], advice


@pytest.mark.parametrize(
    "line",
    [
        'torch.save(model.state_dict(), "a.pt")',
        'torch.save({"m": model.state_dict(), "loss": loss.item()}, os.path.join("out", f"a{rank}.pt"))',
        'np.save("a.npy", loss.detach().cpu().numpy())',
        'np.savez_compressed("a.npz", a=1)',
        'plt.savefig("a.png")',
        'Path("a.txt").write_text(str(loss.item()))',
        'pickle.dump(history, open("a.pkl", "wb"))',
        'open("a.txt", "a").write("x")',
        'model.save_pretrained("a")',
        'with Path("a.txt").open("a") as f:\n    f.write("x")',
        'with open("a.json", "w") as f:\n    text = json.dumps(history)\n    f.write(text)',
    ],
)
def test_one_rank_writes(line: str) -> None:
    text, advice = adopt_with(f"{line}\n")
    indented = "".join(f"    {each}\n" for each in line.split("\n"))
    assert text == f"if run.is_rank_zero:\n{indented}"
    assert not advice.remarks


@pytest.mark.parametrize(
    ("line", "must"),
    [
        (
            'with open("a.json", "w") as f:\n    best = loss.item()\n    json.dump(best, f)\nhistory.append(best)',
            False,
        ),
        ('with open("a.json", "w") as f:\n    history.append(1)\n    json.dump(history, f)', False),
        # all ranks do a forward together
        ('with open("a.json", "w") as f:\n    json.dump(model(X).item(), f)', False),
        ('torch.save(collect(model), "a.pt")', True),
        ('path = torch.save(model, "a.pt")', True),
        ('torch.jit.save(torch.jit.script(model), "a.ts")', True),
        ('if history: torch.save(model, "a.pt")', True),
        ('torch.save(model, "a.pt"); history = []', True),
        ('log = open("a.csv", "a")', False),
    ],
)
def test_what_is_not_certain_stays_and_is_said(line: str, must: bool) -> None:
    text, advice = adopt_with(f"{line}\n")
    assert text.replace("run.print", "print") == f"{line}\n"
    assert [remark.must for remark in advice.remarks] == [must]


def test_memory_and_temporary_files_stay() -> None:
    lines = "buffer = io.BytesIO()\ntorch.save(model, buffer)\n"
    lines += 'with tempfile.NamedTemporaryFile("w") as f:\n    f.write("x")\n'
    text, advice = adopt_with(lines)
    assert (text, advice.remarks) == (lines, [])


def test_a_low_rank_is_no_rank() -> None:
    """`low_rank`, and `rank` in a script without ranks, are numbers like any other."""
    for name in ("low_rank", "rank > 2"):
        text, _ = adopt_with(f'if {name}:\n    torch.save(model, "a.pt")\n    print("saved")\n')
        assert text == (
            f'if {name}:\n    if run.is_rank_zero:\n        torch.save(model, "a.pt")\n    run.print("saved")\n'
        )


def test_what_rank_zero_has_written_must_not_be_read_too_early() -> None:
    _, advice = adopt_with(
        'torch.save(model.state_dict(), "a.pt")\nmodel.load_state_dict(torch.load("a.pt"))\n'
    )
    (remark,) = advice.remarks
    assert remark.must
    assert "run.rank_zero_first()" in remark.text


def test_methods_of_the_script_are_not_those_of_images() -> None:
    """`self.save("a.pt")` may do what all ranks do together."""
    line = 'class Saver:\n    def save(self, path):\n        pass\nSaver().save("a.pt")\n'
    assert adopt_with(line)[0] == line


def test_another_path_of_the_same_name() -> None:
    lines = "def save(path):\n    torch.save(model, path)\n"
    lines += 'def load(path):\n    return torch.load(path)\nsave("a")\nload("b")\n'
    assert [remark.must for remark in adopt_with(lines)[1].remarks] == [False]


def test_folders_that_may_exist() -> None:
    lines = (
        'os.makedirs("a",)\nos.mkdir("b")\nos.makedirs("c", exist_ok=True)\nPath("d").mkdir()\n'
        'try:\n    os.mkdir("e")\nexcept FileExistsError:\n    pass\n'
    )
    text, advice = adopt_with(lines)
    assert text == (
        'os.makedirs("a",exist_ok=True)\nos.makedirs("b", exist_ok=True)\nos.makedirs("c", exist_ok=True)\n'
        'Path("d").mkdir(exist_ok=True)\ntry:\n    os.mkdir("e")\nexcept FileExistsError:\n    pass\n'
    )
    assert not advice.remarks
