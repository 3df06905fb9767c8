"""What becomes of scripts of many habits: few changes, and each of them right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.adopt.script_changes import Advice, advise, broken_help
from paceline.tools.adopt.source_edits import Source, read_source

CORPUS = Path(__file__).parent / "corpus"


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
    ],
)
def test_loaders(line: str, changed: str) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\n"
        f"loader = {line}\nmodel = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(model.parameters())\n"
        "for x in loader:\n    loss = model(x).sum()\n    loss.backward()\n    opt.step()\n"
    )
    assert f"loader = {changed}\n" in advise_text(text).text


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
        "run = paceline.start()",
        "model = run.wrap(model)",
        "run.resume(model=self.model, opt=self.opt, sched=self.sched, loader=self.loader)",
        "for epoch in run.epochs(epochs):",
        "for batch in run.steps(self.loader):",
        "run.log(loss=loss)",
        "loader = run.loader(load(), batch_size=8, shuffle=True, drop_last=True)",
    ]


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


def test_form_feeds_and_semicolons() -> None:
    text = (
        "import torch; from torch.utils.data import DataLoader\ntorch.manual_seed(0)\n\f\n"
        "model = torch.nn.Linear(1, 1); opt = torch.optim.SGD(model.parameters())\n"
        "\ffor x in DataLoader(data, 2, drop_last=True): loss = model(x).mean(); loss.backward(); opt.step()\n"
        '\ftorch.save(model.state_dict(), "a.pt")\n'
    )
    lines = advise_text(text).text.split("\n")
    assert "model = torch.nn.Linear(1, 1); model = run.wrap(model); opt" in "".join(lines)
    assert any(line.endswith("loss.backward(); run.log(loss=loss); opt.step()") for line in lines)
    assert lines[-3:] == [
        "\fif run.is_rank_zero:",
        '    torch.save(model.state_dict(), "a.pt")',
        "",
    ]


def test_the_changes_of_a_plain_script() -> None:
    assert changed_lines("argparse_main") == [
        "import paceline",
        "for batch_idx, (data, target) in enumerate(run.steps(train_loader)):",
        "run.backward(loss)",
        "run.log(loss=loss)",
        "run.print('Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(",
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
    assert not any(each.must for each in adopt("argparse_main").remarks)


# -- any sign of distribution: the script works as it is

DISTRIBUTED = {
    "ddp": "distributed already",
    "ddp_mistakes": "distributed already",
    "helper_says_so": "init_distributed_device in line 8",
    "ignite_helpers": "ignite.distributed in line 2",
    "mesh": "init_device_mesh",
    "mp_spawn": "distributed already",
    "with_accelerate": "uses Accelerate",
    "with_hf_trainer": "uses the Hugging Face Trainer",
    "with_lightning": "uses the Lightning Trainer",
}


@pytest.mark.parametrize(("name", "words"), DISTRIBUTED.items())
def test_distributed_scripts_stay_as_they_are(name: str, words: str) -> None:
    advice = adopt(name)
    assert (advice.edits, advice.text) == ([], (CORPUS / f"{name}.py").read_text())
    assert words in advice.verdict
    style = "--style spawn " if name == "mp_spawn" else ""
    assert advice.next_steps == [f"paceline run {style}--nproc 2 {CORPUS}/{name}.py"]


@pytest.mark.parametrize(
    "line",
    [
        'rank = int(os.environ["RANK"])',
        'size = int(os.getenv("WORLD_SIZE", 1))',
        "from torch.distributed.fsdp import fully_shard",
        "from torch.nn.parallel import DistributedDataParallel as Parallel",
        'parser.add_argument("--local_rank", type=int)',
        "args.world_size = 2",
        "init_distributed_mode(args)",
        "import horovod.torch as hvd",
        "import deepspeed",
    ],
)
def test_a_sign_of_distribution(line: str) -> None:
    advice = advise_text(f"{line}\n{LOOPS}")
    assert advice.edits == []
    assert "None needed" in advice.verdict


@pytest.mark.parametrize("line", ["low_rank, rank = 4, 8", "# not distributed", "x = 'a RANK'"])
def test_what_is_no_sign(line: str) -> None:
    assert advise_text(f"{line}\n{LOOPS}").edits


def test_mistakes_of_distributed_scripts_are_remarks() -> None:
    must = [each.line for each in adopt("ddp_mistakes").remarks if each.must]
    assert must == [21, 22], "MASTER_ADDR, MASTER_PORT"
    assert not [each for each in adopt("ddp").remarks if each.must]
    assert "Frameworks" in adopt("with_lightning").remarks[0].text
    assert advise_text("import paceline\n").verdict.startswith("It already uses Paceline")


# -- what is not certain


def test_what_cannot_be_changed_is_said_with_its_line() -> None:
    for name, lines in {
        "sliced_by_hand": [8],
        "closure": [15, 17],
        "cross_validation": [6],
        "text_by_hand": [17],
    }.items():
        advice = adopt(name)
        assert advice.edits == [], name
        assert [each.line for each in advice.remarks if each.must] == lines
        assert "only you can make" in advice.verdict
    none = advise_text("from engine import train\ntrain()\n")
    assert (none.edits, none.verdict[:25]) == ([], "No training loop was foun")


def test_default_arguments_are_left_alone() -> None:
    text = adopt("default_device").text
    assert 'device=torch.device("cuda" if torch.cuda.is_available() else "cpu")):' in text
    lines = text.splitlines()
    wrap = lines.index("    net = run.wrap(net)")
    assert lines[wrap + 1].startswith("    if args.opt"), "one wrap for both optimizers"


HEAD = """\
import copy, os
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
RESUME = "run.resume(model=model, opt=opt, loader=loader)"


def adopt_end(end: str) -> tuple[list[str], Advice]:
    """Return the lines that follow the loader in the adopted script, and all advice."""
    advice = advise_text(HEAD + end)
    lines = advice.text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("loader = "))
    return lines[first + 1 :], advice


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
    lines, _ = adopt_end(f"{loop}\n{STEPS}")
    assert lines[: 1 + len(changed)] == [RESUME, *changed]


@pytest.mark.parametrize(
    "loop",
    [
        "for epoch in range(start, n):",
        "for epoch in range(2, n):",
        "for epoch in range(0, n, 2):",
        "for epoch, rate in zip(range(n), rates):",
        "for epoch in schedule:",
        "while epoch < n:",
    ],
)
def test_without_counted_epochs_nothing_is_resumed(loop: str) -> None:
    """A run that loads its weights must not begin with the first epoch again."""
    lines, advice = adopt_end(f"{loop}\n{STEPS}")
    assert lines[0] == loop
    assert not any("run.resume(" in line for line in lines)
    told = [each.line for each in advice.remarks if "nothing is resumed" in each.text]
    assert told == [HEAD.count("\n") + 1]


def test_what_exists_only_under_a_condition_is_not_resumed() -> None:
    """A name that may not exist would end the script."""
    lines, advice = adopt_end(
        f"if warm:\n    ema = copy.deepcopy(model)\nfor epoch in range(2):\n{STEPS}"
    )
    assert not any("run.resume" in line or "run.epochs" in line for line in lines)
    assert any("nothing is resumed" in each.text for each in advice.remarks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STEPS.replace("in loader", "in list(loader)"), "itself, anew in each epoch"),
        (STEPS.replace("in loader", "in parts"), "does not read a DataLoader"),
        (
            "    while True:\n        loss = model(x).mean()\n        loss.backward()\n",
            "DataLoader",
        ),
    ],
)
def test_loops_that_are_not_certain_are_left(text: str, words: str) -> None:
    _, advice = adopt_end(f"for epoch in range(2):\n{text}")
    assert advice.edits == []
    assert any(each.must and words in each.text for each in advice.remarks)


def test_models_of_a_comprehension() -> None:
    text = "opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model,)]\nfor epoch in range(2):\n"
    _, advice = adopt_end(text + STEPS)
    assert advice.edits == []
    assert any("for each model" in each.text for each in advice.remarks if each.must)


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ('torch.save(model.state_dict(), "a.pt")', True),
        ('open("a.txt", "a").write("x")', False),
        ('with open("a.json", "w") as f:\n    json.dump(model(X).item(), f)', False),
        ('torch.save(collect(model), "a.pt")', False),
        ('path = torch.save(model, "a.pt")', False),
        ('if history: torch.save(model, "a.pt")', False),
    ],
)
def test_files(line: str, moved: bool) -> None:
    """Rank 0 writes; what another rank may need as well stays, and a remark says so."""
    lines, advice = adopt_end(f"for epoch in range(2):\n{STEPS}{line}\n")
    expected = (
        [line] if not moved else ["if run.is_rank_zero:\n    " + line.replace("\n", "\n    ")]
    )
    assert "\n".join(lines[7:]) == expected[0]
    assert any("write" in each.text for each in advice.remarks) is not moved


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        ("both(model(x), x)", True),
        ("model(x).square().sum()", True),
        ("torch.nn.functional.mse_loss(model(x), x, reduction='sum')", True),
        ("torch.sum(model(x)) / len(x)", False),
        ("model(x).sum(1).mean()", False),
    ],
)
def test_losses_that_are_sums(loss: str, is_sum: bool) -> None:
    text = (
        "def both(a, b):\n    first = (a - b).abs().mean()\n    return first - 0.5 * torch.sum(a)\n"
    )
    steps = STEPS.replace("model(x.cuda()).mean()", loss)
    remarks = adopt_end(f"{text}for epoch in range(2):\n{steps}")[1].remarks
    assert any(each.must and "is a sum over samples" in each.text for each in remarks) is is_sum


def test_the_result_is_checked(tmp_path: Path) -> None:
    """The help of a script runs, before it is written."""
    path = tmp_path / "train.py"
    path.write_bytes((CORPUS / "argparse_main.py").read_bytes())
    source = read_source(path)
    advice = advise(source)
    assert broken_help(source, advice) == ""
    advice.text = advice.text.replace("import paceline", "import paceline\nno_such_name")
    assert "no_such_name" in broken_help(source, advice)
    advice = advise_text(f"def run_it(n=later):\n    pass\n{HEAD}for epoch in range(2):\n{STEPS}")
    assert advice.edits, "a name that the script did not define before is none of ours"
