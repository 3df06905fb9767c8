"""The text example: it learns, resumes exactly, is GPT-2 to the last logit, and reads tokens from one file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.ranks import EXAMPLES, import_from, learn_and_resume, logged, run_example
from tests.forked_ranks import Ranks

SHORT = [
    "--steps",
    "70",
    "--batch-size",
    "16",
    "--warmup",
    "10",
    "--eval-every",
    "40",
    "--sample",
    "20",
]


@pytest.mark.slow  # test_stream.py resumes exactly, and the next test trains
def test_two_ranks_learn_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, EXAMPLES / "text" / "stories.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    text = tmp_path / "stories.txt"
    text.write_text("".join(made.stdout.splitlines(keepends=True)[:300]), encoding="utf-8")
    args = [*SHORT, "--data", str(text), "--tokens", str(tmp_path / "tokens")]
    perplexity, printed = learn_and_resume(ranks, "text", args, tmp_path, stop_at=25, last=60)
    unigram = re.search(
        r"final perplexity: .* \(a unigram model has ([\d.]+)\)\nOnce there was ", printed
    )
    assert unigram, printed
    assert perplexity < 0.6 * float(unigram[1])
    whole, parts = (logged(tmp_path / name, "perplexity") for name in ("whole", "parts"))
    assert parts == whole


def test_every_option_on_a_folder_of_text(ranks: Ranks, tmp_path: Path) -> None:
    books = tmp_path / "books" / "shelf"
    books.mkdir(parents=True)
    for name in ("a", "b"):
        (books / f"{name}.txt").write_text(
            "A café at the sea, and the sea was calm.\n" * 40, encoding="utf-8"
        )
    args = [
        "--data",
        str(tmp_path / "books"),
        "--tokenizer",
        "bpe",
        "--vocab",
        "280",
        "--tokens",
        str(tmp_path / "tokens"),
        "--fsdp",
        "--precision",
        "bf16",
        "--accumulate",
        "2",
        "--batch-size",
        "4",
        "--dropout",
        "0.1",
        "--steps",
        "3",
        "--eval-every",
        "0",
        "--workers",
        "1",
        "--lr",
        "0",
        "--prompt",
        "A café",
        "--sample",
        "3",
        "--folder",
        str(tmp_path / "out"),
    ]
    (perplexity, printed), _ = ranks(run_example, 2, "text", args, timeout=300)
    assert 1 < perplexity < 1000
    assert "step 2: perplexity" not in printed, "--eval-every 0"
    assert set(logged(tmp_path / "out", "lr").values()) == {0.0}
    assert "\nA café" in printed
    assert max(logged(tmp_path / "out", "loss")) == 3


def test_a_text_cannot_begin_with_nothing() -> None:
    command = [sys.executable, EXAMPLES / "text" / "train.py", "--prompt=", "--sample", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--sample needs a --prompt" in done.stderr


def prepare_at_once(folder: str) -> tuple[str, list[int], int]:
    tokens = import_from("text", "tokens")
    corpus = tokens.prepare(None, Path(folder))
    return (
        corpus.folder.name,
        corpus.blocks("train", 64).tokens[:5].tolist(),
        len(list(Path(folder).iterdir())),
    )


def test_processes_prepare_the_same_tokens_at_once(ranks: Ranks, tmp_path: Path) -> None:
    made = ranks(prepare_at_once, 4, str(tmp_path))
    assert len({(name, *first) for name, first, _ in made}) == 1
    assert [path.name for path in tmp_path.iterdir()] == [made[0][0]], "nothing partial is left"


def cut_tokens(folder: str) -> dict[str, Any]:
    tokens = import_from("text", "tokens")
    text = Path(folder) / "x.txt"
    text.write_text("0123456789" * 10, encoding="utf-8")
    corpus = tokens.prepare(text, Path(folder) / "tokens")
    found: dict[str, Any] = {
        "folders": {corpus.folder},
        "lines": corpus.tokenizer.decode([97, 256, 98]),
    }
    for part in ("train", "validation"):
        blocks = corpus.blocks(part, 8)
        inputs, targets = zip(*(blocks[index] for index in range(len(blocks))), strict=True)
        found[part] = (torch.stack(inputs).numpy(), torch.stack(targets).numpy())
    text.write_text("0123456789" * 11, encoding="utf-8")
    found["folders"].add(tokens.prepare(text, Path(folder) / "tokens").folder)
    bpe = tokens.prepare(text, Path(folder) / "tokens", tokenizer="bpe", vocab=258)
    found["folders"].add(bpe.folder)
    found["text"] = bpe.tokenizer.decode(bpe.blocks("train", 8).tokens.tolist())
    again = tokens.prepare(
        text, Path(folder) / "tokens", tokenizer=str(bpe.folder / "tokenizer.json")
    )
    found["equal"] = (again.folder / "tokens.bin").read_bytes() == (
        bpe.folder / "tokens.bin"
    ).read_bytes()
    return found


def test_blocks_hold_every_token_once(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(cut_tokens, 1, str(tmp_path))[0]
    written = [*(b"0123456789" * 10), 256]
    inputs, targets = found["train"]
    assert targets[targets != -100].tolist() == written[1:91]
    assert inputs.flatten()[:90].tolist() == written[:90]
    assert inputs.shape == (12, 8)
    _, targets = found["validation"]
    assert targets[targets != -100].tolist() == written[92:]
    assert len(found["folders"]) == 3, "changed text and another tokenizer make other files"
    assert found["lines"] == "a\nb", "a document ends its line"
    assert found["text"].startswith("0123456789")
    assert found["equal"]


def compute_losses() -> tuple[list[tuple[float, list[Any]]], Any, int]:
    """Return the loss and gradients by torch, in one piece, in pieces and in bf16; and the loss without gradients."""
    model, loss = import_from("text", "model"), import_from("text", "loss")
    torch.manual_seed(0)
    net = model.GPT(model.SIZES["tiny"], vocab=50)
    tokens = torch.randint(50, (4, 65))
    targets = tokens[:, 1:].clone()
    targets[0, :9] = loss.IGNORE

    def by_torch() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            net(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"
        )

    def by_rows(rows: int) -> torch.Tensor:
        loss.LOGIT_ROWS = rows
        return net(tokens[:, :-1], targets)

    results = []
    for rows, dtype in ((0, None), (4096, None), (100, None), (100, torch.bfloat16)):
        net.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            total = by_rows(rows) if rows else by_torch()
        (total / 100).backward()
        results.append((total.item(), [each.grad.numpy().copy() for each in net.parameters()]))
    with torch.no_grad():
        evaluated = by_rows(100).item()
    with torch.device("meta"):
        published = model.GPT(model.SIZES["124M"], vocab=50257)
    return results, evaluated, sum(each.numel() for each in published.parameters())


def test_losses_in_pieces_are_those_of_torch(ranks: Ranks) -> None:
    results, evaluated, parameters = ranks(compute_losses, 1)[0]
    (expected, gradients), *exact, (rough, rough_gradients) = results
    assert evaluated == pytest.approx(expected)
    for total, found in exact:
        assert total == pytest.approx(expected)
        for one, other in zip(found, gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert rough == pytest.approx(expected, rel=0.01)
    for one, other in zip(rough_gradients, gradients, strict=True):
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)
    assert parameters == 124_439_808


def test_a_written_text_changes_no_terminal() -> None:
    printable = import_from("text", "train").printable
    assert printable("A café\n\x1b[2J\x07\x9b\ufffd") == "A café\n\\x1b[2J\\x07\\x9b\ufffd"
