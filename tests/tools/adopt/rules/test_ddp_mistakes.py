"""Scripts with DDP of their own: what is wrong is fixed or said, and what is right stays."""

from __future__ import annotations

import pytest

from paceline.tools.adopt.script_changes import Advice, advise
from paceline.tools.adopt.source_edits import Source

HEAD = """\
import argparse, os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

"""
START = 'dist.init_process_group("gloo")\nrank = dist.get_rank()\n'
MODEL = "model = DDP(torch.nn.Linear(1, 1))\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
DATA = (
    "sampler = DistributedSampler(data)\nloader = DataLoader(data, batch_size=8, sampler=sampler)\n"
)
LOOP = """\
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        opt.step()
"""


def adopt(text: str) -> Advice:
    return advise(Source(HEAD + text, "train.py"))


def added(text: str) -> list[str]:
    """Return the lines that only the adopted script has."""
    before = (HEAD + text).split("\n")
    return [line for line in adopt(text).text.split("\n") if line not in before]


def musts(text: str) -> list[tuple[int, str]]:
    """Return the lines, counted without the head, and the first words of what must be changed."""
    return [
        (each.line - HEAD.count("\n"), each.text[:24]) for each in adopt(text).remarks if each.must
    ]


def test_a_right_script_stays() -> None:
    advice = adopt(START + MODEL + DATA + LOOP)
    assert (advice.edits, advice.verdict) == ([], "None needed: it already uses DDP.")


@pytest.mark.parametrize(
    "end",
    [
        'torch.save(model, f"state_rank{rank}.pt")',
        'path = os.path.join("out", f"{rank}.pt")\ntorch.save(model, path)',
        'if rank == 0:\n    torch.save(model, "a.pt")',
        'if rank == 0 and epoch % 5 == 0:\n    torch.save(model, "a.pt")',
        'if not rank:\n    torch.save(model, "a.pt")',
        'if int(os.environ["LOCAL_RANK"]) == 0:\n    torch.save(model, "a.pt")',
        'rank == 0 and torch.save(model, "a.pt")',
        'torch.save(model, "a.pt") if rank == 0 else None',
        'main = rank == 0\nif main:\n    torch.save(model, "a.pt")',
        'is_master = not rank\nif is_master:\n    torch.save(model, "a.pt")',
        'def save():\n    torch.save(model, "a.pt")\nif rank == 0:\n    save()',
        'def save():\n    if rank != 0:\n        return\n    torch.save(model, "a.pt")\nsave()',
        '@rank_zero_only\ndef save():\n    torch.save(model, "a.pt")\nsave()',
        'for each in range(3):\n    if rank != 0:\n        continue\n    torch.save(model, "a.pt")',
        'match rank:\n    case 0:\n        torch.save(model, "a.pt")',
        'gpu_id = int(os.environ["LOCAL_RANK"])\nif gpu_id == 0:\n    torch.save(model, "a.pt")',
    ],
)
def test_saves_of_one_rank_and_of_each_rank_stay(end: str) -> None:
    advice = adopt(START + MODEL + DATA + LOOP + end + "\n")
    assert advice.edits == []
    assert "None needed" in advice.verdict


@pytest.mark.parametrize("test", ["low_rank", "args.use_lora", "epoch % 5 == 0"])
def test_saves_of_all_ranks_get_a_condition(test: str) -> None:
    end = f'if {test}:\n    torch.save(model.state_dict(), "a.pt")\n'
    assert added(START + MODEL + DATA + LOOP + end) == [
        "    if dist.get_rank() == 0:",
        '        torch.save(model.state_dict(), "a.pt")',
    ]


@pytest.mark.parametrize(
    "text",
    [
        'if args.distributed:\n    dist.init_process_group("gloo")\n' + MODEL + DATA + LOOP,
        'def setup():\n    if "RANK" not in os.environ:\n        return\n    dist.init_process_group("gloo")\nsetup()\n'
        + MODEL
        + DATA
        + LOOP,
        START + MODEL + DATA + LOOP + "dist.destroy_process_group()\n",
    ],
)
def test_without_a_certain_group_nothing_asks_for_the_rank(text: str) -> None:
    """`dist.get_rank()` would fail where there is no group."""
    end = 'torch.save(model.state_dict(), "a.pt")\n'
    assert added(text + end) == []
    assert [words for _, words in musts(text + end)] == ["all ranks write this fil"]
    assert "None needed" not in adopt(text + end).verdict


def test_ranks_that_read_all_of_the_data() -> None:
    plain = "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
    loop = LOOP.replace("    sampler.set_epoch(epoch)\n", "")
    assert musts(START + MODEL + plain + loop) == [(5, "every rank trains on all")]
    assert adopt(START + MODEL + plain + loop).verdict.endswith("you have to fix yourself.")
    for own in (
        "loader = DataLoader(Subset(data, range(rank, 64, 2)), batch_size=8)\n",
        "class Stream(IterableDataset):\n    def __iter__(self):\n        return iter(range(dist.get_rank(), 9, 2))\n"
        "loader = DataLoader(Stream(), batch_size=8)\n",
    ):
        assert musts(START + MODEL + own + loop) == []


def test_a_forward_around_ddp() -> None:
    inner = LOOP.replace("model(x)", "model.module(x)")
    assert musts(START + MODEL + DATA + inner) == [(10, "this bypasses DDP, so gr")]
    evaluation = LOOP + "    with torch.no_grad():\n        model.module(x)\n"
    assert musts(START + MODEL + DATA + evaluation) == []


def test_a_model_without_ddp() -> None:
    second = "other = torch.nn.Linear(1, 1)\nopt2 = torch.optim.SGD(other.parameters(), lr=0.1)\n"
    assert musts(START + MODEL + second + DATA + LOOP) == [(6, "`other` is trained here,")]
    late = "net = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\nmodel = DDP(net)\n"
    assert musts(START + late + DATA + LOOP) == []


def test_the_sampler_of_training_gets_the_epoch() -> None:
    loop = LOOP.replace("    sampler.set_epoch(epoch)\n", "")
    both = (
        "valid_sampler = DistributedSampler(data)\ntrain_sampler = DistributedSampler(data)\n"
        "valid = DataLoader(data, batch_size=8, sampler=valid_sampler)\n"
        "loader = DataLoader(data, batch_size=8, sampler=train_sampler)\n"
    )
    assert added(START + MODEL + both + loop) == ["    train_sampler.set_epoch(epoch)"]
    told = loop.replace("range(2):\n", "range(2):\n    valid_sampler.set_epoch(epoch)\n")
    assert added(START + MODEL + both + told) == ["    train_sampler.set_epoch(epoch)"]
    optional = DATA.replace(
        "DistributedSampler(data)", "DistributedSampler(data) if dist.is_initialized() else None"
    )
    assert added(START + MODEL + optional + loop) == []
    assert musts(START + MODEL + optional + loop) == [(7, "call set_epoch(epoch) on")]


def test_addresses_and_identity() -> None:
    fixed = 'dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=int(os.environ["RANK"]), world_size=2)\n'
    text = fixed + 'os.environ["WORLD_SIZE"] = "2"\n' + MODEL + DATA + LOOP
    assert added(text) == [fixed.replace("tcp://127.0.0.1:29500", "env://").strip()]
    assert musts(text) == [(1, "remove world_size=...: t"), (2, "remove this: it overwrit")]
    chosen = fixed.replace('"tcp://127.0.0.1:29500"', "args.url").replace(
        "world_size=2", "world_size=args.n"
    )
    assert added(chosen + MODEL + DATA + LOOP) == []
    assert any("must be" in each.text for each in adopt(chosen + MODEL + DATA + LOOP).remarks)


def test_a_script_that_spawns_keeps_its_address() -> None:
    worker = (
        "def work(rank, world, port):\n"
        '    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)\n'
        + "".join(f"    {line}\n" for line in (MODEL + DATA + LOOP).splitlines())
        + '    torch.save(model.state_dict(), "a.pt")\n'
    )
    main = 'if __name__ == "__main__":\n    torch.save({}, "first.pt")\n    mp.spawn(work, (2, 29777), 2)\n'
    assert added(worker + main) == [
        "    if dist.get_rank() == 0:",
        '        torch.save(model.state_dict(), "a.pt")',
    ]
    assert [line for line, _ in musts(worker + main)] == [15], "the parent has no group"
    assert "--style spawn" in adopt(worker + main).next_steps[0]


def test_a_rank_from_slurm_must_be_changed() -> None:
    start = (
        'rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])\n'
        'dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))\n'
    )
    advice = adopt(start + MODEL + DATA + LOOP)
    assert [words for _, words in musts(start + MODEL + DATA + LOOP)] == [
        "SLURM_PROCID is about Sl"
    ]
    assert "None needed" not in advice.verdict
    either = 'rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))\n'
    assert musts(START + either + MODEL + DATA + LOOP) == []


@pytest.mark.parametrize(
    "test", ["loss.item() < best", "better(loss)", "evaluate(model, rank) > best"]
)
def test_a_save_by_the_loss_gets_a_condition(test: str) -> None:
    """The loss comes from a model on the device of the rank, which makes no condition of it."""
    local = 'local = int(os.environ["LOCAL_RANK"])\n'
    model = MODEL.replace("Linear(1, 1)", "Linear(1, 1).to(local), device_ids=[local]")
    end = f'    if {test}:\n        best = loss.item()\n        torch.save(model.module.state_dict(), "best.pt")\n'
    assert added(START + local + model + DATA + "best = 9.0\n" + LOOP + end) == [
        "        if dist.get_rank() == 0:",
        '            torch.save(model.module.state_dict(), "best.pt")',
    ]
    first = 'number = int(os.environ["RANK"])\nif number < 1:\n    torch.save(model, "a.pt")\n'
    assert added(START + local + model + DATA + LOOP + first) == []


def test_a_script_that_chooses_its_backend() -> None:
    def remarks(backend: str) -> list[str]:
        advice = adopt(START.replace('"gloo"', backend) + MODEL + DATA + LOOP)
        return [each.text for each in advice.remarks if "needs GPUs" in each.text]

    assert len(remarks('"nccl"')) == 1
    assert remarks('"nccl" if torch.cuda.is_available() else "gloo"') == []
