"""`paceline adopt`: scripts of many habits, and what becomes of them."""

from __future__ import annotations

import ast
import difflib
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.commands.adopt import _list
from paceline.errors import UsageError
from paceline.launch.local.machine import usable_gpus
from paceline.tools.adopt.script_changes import Advice, advise
from paceline.tools.adopt.source_edits import Source, read_source

CORPUS = Path(__file__).parents[2] / "adoption" / "corpus"
Paceline = Callable[..., "subprocess.CompletedProcess[str]"]


def adopt(name: str) -> Advice:
    return advise(read_source(CORPUS / f"{name}.py"))


def advise_text(text: str) -> Advice:
    return advise(Source(text, "train.py"))


def changed_lines(name: str) -> list[str]:
    """Return the lines that a script has only once it is adopted."""
    before = (CORPUS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in adopt(name).text.splitlines() if line not in before]


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.py")), ids=lambda path: path.stem)
def test_the_result_is_a_script_and_nothing_is_left_to_change(path: Path) -> None:
    advice = advise(read_source(path))
    again = advise(Source(advice.text, path.name))
    assert again.edits == []
    assert all(edit.reason for edit in advice.edits)
    removed = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    comments = [line for line in removed if line.startswith("#")]
    assert all(line in advice.text for line in comments)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "habit", ["tabs", "crlf", "no final newline", "latin-1 and a byte order mark"]
)
def test_layout_and_encoding_stay(path: Path, habit: str, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected, encoding = advise(read_source(path)).text, "utf-8"
    if habit == "tabs":
        text, expected = (
            re.sub(r"(?m)^(    )+", lambda m: "\t" * (len(m[0]) // 4), each)
            for each in (text, expected)
        )
    elif habit == "crlf":
        text, expected = (each.replace("\n", "\r\n") for each in (text, expected))
    elif habit == "no final newline":
        text, expected = text.rstrip("\n"), expected.rstrip("\n")
    else:
        encoding = "utf-8-sig" if not text.isascii() else "iso-8859-1"
        prefix = "" if encoding == "utf-8-sig" else "# coding: latin-1\n# \xe4\n"
        text, expected = prefix + text, prefix + expected
    script = tmp_path / "train.py"
    script.write_bytes(text.encode(encoding))
    source = read_source(script)
    assert source.encoding == encoding
    assert advise(source).text.rstrip("\n") == expected.rstrip("\n")


def test_the_changes_of_a_plain_script() -> None:
    assert changed_lines("argparse_main") == [
        "import paceline",
        "for batch_idx, (data, target) in enumerate(run.steps(train_loader)):",
        "run.backward(loss)",
        "run.log(loss=loss)",
        "run.print('Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(",
        "run.print('\\nTest set: Average loss: {:.4f}\\n'.format(test_loss))",
        "device = run.device",
        "train_loader = run.loader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=False)",
        "model = run.wrap(model)",
        "run.resume(model=model, optimizer=optimizer, scheduler=scheduler, train_loader=train_loader)",
        "for epoch in run.epochs(args.epochs):",
        "epoch += 1",
        "if run.is_rank_zero:",
        'torch.save(model.state_dict(), "net.pt")',
        "run = paceline.start()",
    ]
    remarks = adopt("argparse_main").remarks
    assert [(each.line, each.must) for each in remarks] == [(34, False), (43, False), (0, False)], (
        "its own loss, the evaluation, functions that need the run"
    )


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "adopt.md").read_text(encoding="utf-8")
    block = re.search(r"^--- a/train.py\n.*?(?=^```)", page, flags=re.MULTILINE | re.DOTALL)
    assert block
    lines = block[0].splitlines()
    before = "\n".join(line[1:] for line in lines[3:] if not line.startswith("+")) + "\n"
    after = advise_text(before).text.splitlines()
    diff = difflib.unified_diff(before.splitlines(), after, "a/train.py", "b/train.py", lineterm="")
    assert list(diff) == lines


def test_scripts_of_frameworks_stay_as_they_are() -> None:
    for name, words in {
        "with_accelerate": "uses Accelerate",
        "with_lightning": "uses the Lightning Trainer",
        "with_hf_trainer": "uses the Hugging Face Trainer",
        "ddp": "already uses DDP",
    }.items():
        advice = adopt(name)
        assert (advice.edits, advice.text) == ([], (CORPUS / f"{name}.py").read_text())
        assert "None needed" in advice.verdict
        assert words in advice.verdict
        assert advice.next_steps[0].startswith("paceline run ")
    assert "ckpt_path" in adopt("with_lightning").remarks[0].text
    assert advise_text("import paceline\nrun = paceline.start()\n").verdict.startswith(
        "It already uses Paceline"
    )


def test_mistakes_in_ddp() -> None:
    assert changed_lines("ddp_mistakes") == [
        "import os",
        'parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))',
        "os.environ.setdefault(\"MASTER_ADDR\", 'localhost')",
        "os.environ.setdefault(\"MASTER_PORT\", '12355')",
        'dist.init_process_group("gloo", init_method="env://", rank=int(os.environ["RANK"]),',
        "train_loader.sampler.set_epoch(epoch)",
        "if dist.get_rank() == 0:",
        'torch.save(model.module.state_dict(), f"model-{epoch}.pt")',
    ]
    assert any(
        "evaluates all of the data" in remark.text for remark in adopt("ddp_mistakes").remarks
    )
    assert adopt("mp_spawn").next_steps == [
        f"paceline run --style spawn --nproc 2 {CORPUS}/mp_spawn.py"
    ]


def test_what_cannot_be_changed_is_said_with_its_line() -> None:
    sliced, folds = adopt("sliced_by_hand"), adopt("cross_validation")
    assert "make the remaining ones yourself" in sliced.verdict
    assert {(each.line, each.must) for each in sliced.remarks} == {(8, True)}
    assert [each.line for each in folds.remarks if each.must] == [6, 18], (
        "one function makes both loaders"
    )
    assert {each.line for each in folds.remarks} >= {6, 10, 13}, "BatchNorm and the loop of folds"
    assert [(each.line, each.must) for each in adopt("decorated_main").remarks] == [
        (37, True),
        (37, False),
        (0, False),
    ]
    assert "x.to(run.device)" in adopt("decorated_main").remarks[0].text, "it evaluates on the CPU"
    none = advise_text("from engine import train\ntrain()\n")
    assert (none.edits, none.verdict[:25]) == ([], "No training loop was foun")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        (
            "DataLoader(data, 4, True, num_workers=2)",
            "run.loader(data, batch_size=4, shuffle=True, num_workers=2, drop_last=False)",
        ),
        (
            "DataLoader(data, batch_size=4)",
            "run.loader(data, batch_size=4, shuffle=False, drop_last=False)",
        ),
        (
            "DataLoader(data, sampler=order, batch_size=4, drop_last=True)",
            "run.loader(data, sampler=order, batch_size=4, drop_last=True)",
        ),
        ("DataLoader(data, batch_sampler=order)", "run.loader(data, batch_sampler=order)"),
        (
            "DataLoader(data, batch_size=4, shuffle=True, generator=g, drop_last=True)",
            "run.loader(data, batch_size=4, shuffle=True, seed=g.initial_seed(), drop_last=True)",
        ),
        (
            "DataLoader(data, **options)",
            'run.loader(data, **{"shuffle": False, "drop_last": False, **options})',
        ),
        (
            "DataLoader(data, 4, True, **options)",
            'run.loader(data, batch_size=4, shuffle=True, **{"drop_last": False, **options})',
        ),
        (
            "DataLoader(data, shuffle=True, drop_last=True, **options)",
            "run.loader(data, shuffle=True, drop_last=True, **options)",
        ),
    ],
)
def test_loaders(line: str, changed: str) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\n"
        f"loader = {line}\nmodel = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(model.parameters())\n"
        "for x in loader:\n    loss = model(x).sum()\n    loss.backward()\n    opt.step()\n"
    )
    assert f"loader = {changed}\n" in advise_text(text).text


def test_compiled_and_tracked() -> None:
    text = (
        "import torch\nimport wandb\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\nwandb.init()\n"
        "model = torch.nn.Linear(1, 1)\nmodel = torch.compile(model, mode='default')\n"
        "opt = torch.optim.SGD(model.parameters())\n"
        "for x in DataLoader([1.0], batch_size=2):\n    loss = model(x).sum()\n    loss.backward()\n    opt.step()\n"
    )
    lines = advise_text(text).text.splitlines()
    assert "import paceline.wandb as wandb" in lines
    assert "model = run.wrap(model, compile=dict(mode='default'))" in lines
    assert (
        "for x in run.steps(run.loader([1.0], batch_size=2, shuffle=False, drop_last=False)):"
        in lines
    )
    assert lines.index("run = paceline.start()") < lines.index(
        "model = run.wrap(model, compile=dict(mode='default'))"
    )


def test_changes_inside_of_others() -> None:
    text = (
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\n"
        "a = nn.DataParallel(nn.Linear(1, 1).cuda(), device_ids=[0]).cuda()\n"
        "b = nn.DataParallel(nn.Linear(1, 1) if big else nn.Identity()).cuda(0)\n"
        "c = torch.compile(nn.Linear(1, 1).cuda())\n"
        "opt = torch.optim.SGD([*a.module.parameters(), *c.parameters()], lr=0.1)\n"
        "for x in DataLoader(data, batch_size=2):\n"
        "    (a(x.cuda()) + c((x + x).cuda(non_blocking=True))).mean().backward(retain_graph=True)\n    opt.step()\n"
        "sizes = [train(x) for x in DataLoader(data)]\n"
    )
    lines = advise_text(text).text.splitlines()
    device = "to(run.device)"
    assert f"a = nn.Linear(1, 1).{device}.{device}" in lines
    assert f"b = (nn.Linear(1, 1) if big else nn.Identity()).{device}" in lines
    assert f"c = nn.Linear(1, 1).{device}" in lines
    assert "c = run.wrap(c, compile=True)" in lines
    assert "opt = torch.optim.SGD([*a.parameters(), *c.parameters()], lr=0.1)" in lines
    both = f"(a(x.{device}) + c((x + x).to(run.device, non_blocking=True))).mean()"
    assert f"    run.backward({both}, retain_graph=True)" in lines


def test_other_uses_of_a_loader() -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\nfrom helpers import fit\nfrom tqdm import tqdm\n"
        "torch.manual_seed(0)\n"
        "loader = DataLoader(data, batch_size=2, drop_last=True)\nfit(loader)\n"
        "n = len(loader.dataset), len(loader.sampler)\n"
        "model = torch.nn.Linear(1, 1).cuda()\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "bar = tqdm(loader)\nfor x in bar:\n    loss = model(x.cuda()).mean()\n    loss.backward()\n    opt.step()\n"
        "    bar.set_description('a')\n"
    )
    remarks = [(each.line, each.must) for each in advise_text(text).remarks]
    assert remarks == [(8, True), (7, False)]


def test_training_in_a_comprehension() -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\nmodel = torch.nn.Linear(1, 1).cuda()\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\ndef step(x):\n    loss = model(x.cuda()).mean()\n"
        "    loss.backward()\n    opt.step()\n    return loss.item()\n"
        "losses = [step(x) for x in DataLoader(data, batch_size=2)]\n"
    )
    assert any(
        "this trains in a comprehension" in each.text
        for each in advise_text(text).remarks
        if each.must
    )


LOOPS = """\
import torch
import typer
from torch.utils.data import DataLoader
from transformers import AutoModel, get_linear_schedule_with_warmup
from tqdm import trange

app = typer.Typer()


class Trainer:  # not that of transformers
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.opt = torch.optim.AdamW(model.parameters())
        self.sched = get_linear_schedule_with_warmup(self.opt, 10, 100)

    def fit(self, epochs):
        for epoch in trange(epochs):
            for batch in self.loader:
                for part in batch.chunk(2):
                    loss = self.model(part).loss
                    loss.backward()
                self.opt.step()
                self.sched.step()


@app.command()
def main(epochs: int = 3):
    torch.manual_seed(0)
    loader = DataLoader(load(), 8, True, drop_last=True)
    Trainer(AutoModel.from_pretrained("x"), loader).fit(epochs)


app()
"""


def test_loops_and_calls_that_are_hard_to_see() -> None:
    """The loop that reads the loader is not the innermost one, and a library calls the main function."""
    lines = [
        line.strip()
        for line in advise_text(LOOPS).text.splitlines()
        if line not in LOOPS.splitlines()
    ]
    assert lines == [
        "import paceline",
        "model = run.wrap(model)",
        "run.resume(model=self.model, opt=self.opt, sched=self.sched, loader=self.loader)",
        "for epoch in run.epochs(epochs):",
        "for batch in run.steps(self.loader):",
        "run.log(loss=loss)",
        "loader = run.loader(load(), batch_size=8, shuffle=True, drop_last=True)",
        "run = paceline.start()",
    ]


FILES = """\
import json, os, torch
from pathlib import Path
from torch.utils.data.dataloader import DataLoader

torch.manual_seed(0)
if not os.path.exists("out"):
    os.mkdir("out")
Path("out").mkdir(parents=True)
model = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters())
with open("log.txt", "a") as log:
    for x in DataLoader(data, 2, drop_last=True):
        loss = model(x).mean()
        loss.backward()
        opt.step()
with open("a.json", "w") as a:

    with open("b.json", mode="w") as b:
        json.dump({}, b)
    a.write('''two
lines''')
with open("c.json") as c:
    json.load(c)
"""


def test_files_and_folders() -> None:
    advice = advise_text(FILES)
    assert (
        '    os.makedirs("out", exist_ok=True)\nPath("out").mkdir(parents=True, exist_ok=True)\n'
        in advice.text
    )
    end = advice.text[advice.text.index("if run.is_rank_zero:") :].splitlines()
    assert end == [
        "if run.is_rank_zero:",
        '    with open("a.json", "w") as a:',
        "",
        '        with open("b.json", mode="w") as b:',
        "            json.dump({}, b)",
        "        a.write('''two",
        "lines''')",
        'with open("c.json") as c:',
        "    json.load(c)",
    ]
    assert [(each.line, "all ranks write" in each.text) for each in advice.remarks] == [
        (11, True)
    ], "the loop is in it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def broken(:\n", "not valid Python in line 1"),
        (b"x = 1\n  y = 2\n", "not valid Python in line 2"),
        (b"\xff\xfe\x00", "Python cannot read"),
        (b"# coding: nowhere\n", "Python cannot read"),
        (b"x = '\0'\n", "is not valid Python"),
        (b"(" * 3000 + b")" * 3000, "is n"),
    ],
)
def test_what_is_no_script(content: bytes, message: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        advise(read_source(script))


def test_an_empty_script() -> None:
    assert "No training loop" in advise_text("").verdict
    assert "No training loop" in advise_text("# nothing\n").verdict


def test_write_keeps_the_old_script(tmp_path: Path, paceline: Paceline) -> None:
    old = (CORPUS / "notebook.py").read_bytes()
    script, link = tmp_path / "real.py", tmp_path / "train.py"
    script.write_bytes(old)
    script.chmod(0o750)
    link.symlink_to(script)
    (tmp_path / "real.py.orig").write_text("somebody else's")
    shown = paceline("adopt", "train.py", check=True)
    assert "--- a/train.py" in shown.stdout
    assert "+run = paceline.start(seed=0)" in shown.stdout
    assert "to apply it: paceline adopt --write train.py" in shown.stdout
    assert script.read_bytes() == old
    done = paceline("adopt", "--write", "train.py", check=True)
    assert "the old one is" in done.stdout
    assert link.is_symlink()
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert b"paceline.start" in script.read_bytes()
    ast.parse(script.read_bytes())
    assert (tmp_path / "real.py.orig.2").read_bytes() == old
    assert (tmp_path / "real.py.orig").read_text() == "somebody else's"
    again = paceline("adopt", "--write", "train.py", check=True)
    assert "It already uses Paceline" in again.stdout
    assert sorted(os.listdir(tmp_path)) == ["real.py", "real.py.orig", "real.py.orig.2", "train.py"]


def test_remarks_name_lines_of_the_file_as_it_is(tmp_path: Path, paceline: Paceline) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\nmodel = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = DataLoader(TensorDataset(torch.ones(8, 2)), 2)\n"
        "for epoch in range(2):\n    for (x,) in loader:\n        loss = model(x).mean()\n        opt.zero_grad()\n"
        "        loss.backward()\n        opt.step()\n    print(loss.item())\n"
    )
    assert (
        "line 13: only the loop of line 8 assigns loss"
        in paceline("adopt", "train.py", check=True).stdout
    )
    written = paceline("adopt", "--write", "train.py", check=True).stdout
    new = script.read_text().splitlines()
    loop, read = (
        1 + next(n for n, line in enumerate(new) if text in line)
        for text in ("for (x,) in", "print(")
    )
    assert loop != 8
    assert f"line {read}: only the loop of line {loop} assigns loss" in written


def test_line_numbers_are_those_of_the_file_as_it_is(tmp_path: Path, paceline: Paceline) -> None:
    script = tmp_path / "train.py"
    script.write_text(GUARDED)
    shown = paceline("adopt", "train.py", check=True).stdout
    lines = GUARDED.splitlines()
    assert (
        f"line {lines.index('    for epoch in range(first, 3):') + 1}: this epoch loop is left unchanged"
        in shown
    )
    assert "line 2: the import that the lines below need" not in shown
    written = paceline("adopt", "--write", "train.py", check=True).stdout
    new = script.read_text().splitlines()
    assert (
        f"line {new.index('    for epoch in range(first, 3):') + 1}: this epoch loop is left unchanged"
        in written
    )
    assert (
        f"line {new.index('import paceline') + 1}: the import that the lines below need" in written
    )
    assert f"line {new.index('    run = paceline.start()') + 1}: finds this rank" in written
    assert (
        "  train and main use `run`, which exists only when train.py runs as the script" in written
    )
    module: dict[str, Any] = {"__name__": "train"}
    exec(script.read_text(), module)
    # as `train.run = paceline.start()` sets it
    module["run"] = SimpleNamespace(steps=lambda loader: iter(()))
    module["train"](None, None, None)


def test_neighbouring_lines_are_ranges() -> None:
    assert _list([107, 108, 109, 110]) == "107 to 110"
    assert _list([3, 7, 8, 9, 12, 13]) == "3, 7 to 9, 12, 13"


def test_write_tells_what_is_left(tmp_path: Path, paceline: Paceline) -> None:
    """A script that is changed in part is written, and the exit code says that it is not done."""
    script = tmp_path / "my train.py"
    script.write_bytes((CORPUS / "sliced_by_hand.py").read_bytes())
    shown = paceline("adopt", script.name, check=True)
    assert "to apply it: paceline adopt --write 'my train.py'" in shown.stdout
    tried = "--nproc 2" if usable_gpus(os.environ) > 1 else "--cpu --nproc 2"
    assert f"\nthen check it:\n  paceline run {tried} 'my train.py'\n" in shown.stdout
    script.chmod(0o444)
    refused = paceline("adopt", "--write", script.name)
    assert (refused.returncode, "is read-only" in refused.stderr) == (2, True), refused.stderr
    script.chmod(0o644)
    done = paceline("adopt", "--write", script.name)
    assert (done.returncode, "change these yourself:" in done.stdout) == (1, True)
    assert "paceline.start" in script.read_text()


def test_form_feeds_and_semicolons() -> None:
    text = (
        "import torch; from torch.utils.data import DataLoader\ntorch.manual_seed(0)\n\f\n"
        "model = torch.nn.Linear(1, 1); opt = torch.optim.SGD(model.parameters())\n"
        "\ffor x in DataLoader(data, 2, drop_last=True): loss = model(x).mean(); loss.backward(); opt.step()\n"
        '\ftorch.save(model.state_dict(), "a.pt")\n'
    )
    lines = advise_text(text).text.split("\n")
    assert (
        "model = torch.nn.Linear(1, 1); run = paceline.start(); model = run.wrap(model); opt"
        in "".join(lines)
    )
    assert any(line.endswith("loss.backward(); run.log(loss=loss); opt.step()") for line in lines)
    assert lines[-3:] == [
        "if run.is_rank_zero:",
        '\f    torch.save(model.state_dict(), "a.pt")',
        "",
    ]


def test_everything_imported() -> None:
    text = (
        "from torch import *\nfrom torch.nn import *\nfrom torch.optim import *\nfrom torch.utils.data import *\n"
        "manual_seed(0)\nmodel = Linear(1, 1)\nopt = SGD(model.parameters(), lr=0.1)\n"
        "for x in DataLoader(data, batch_size=2, drop_last=True):\n    loss = model(x).mean()\n"
        "    autograd.backward(loss)\n    opt.step()\n"
        'save(model.state_dict(), "a.pt")\n'
    )
    advice = advise_text(text)
    assert (
        "for x in run.steps(run.loader(data, batch_size=2, drop_last=True, shuffle=False)):"
        in advice.text
    )
    assert 'if run.is_rank_zero:\n    save(model.state_dict(), "a.pt")' in advice.text
    assert not any(each.must for each in advice.remarks)


def test_mistakes_on_the_command_line(tmp_path: Path, paceline: Paceline) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.py").write_text("def (\x1b[31m")
    for name, message in {
        "none.py": "There is no script",
        "folder": "is a folder",
        "broken.py": "not valid",
    }.items():
        done = paceline("adopt", "--write", name)
        assert (done.returncode, message in done.stderr, "\x1b" in done.stderr) == (
            2,
            True,
            False,
        ), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["broken.py", "folder"]


GUARDED = """\
import torch
from torch.utils.data import DataLoader


def train(model, loader, optimizer):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(first):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([(torch.randn(8), torch.randn(1))] * 64, batch_size=8, drop_last=True)
    for epoch in range(first, 3):
        train(model, loader, optimizer)


if __name__ == "__main__":
    main(0)
"""
