"""The example of text classification: it learns, resumes exactly, and trains the same on any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.ranks import (
    EXAMPLES,
    import_from,
    learn_and_resume,
    logged,
    run_example,
    saved_tensors,
)
from tests.forked_ranks import Ranks


@pytest.fixture(scope="module")
def tickets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of JSON, as the script writes them."""
    made = subprocess.run(
        [sys.executable, EXAMPLES / "classify" / "tickets.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.splitlines(keepends=True)


def write_rows(path: Path, rows: list[str]) -> str:
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_two_ranks_learn_and_resume_exactly(
    ranks: Ranks, tmp_path: Path, tickets: list[str]
) -> None:
    args = [
        "--data",
        write_rows(tmp_path / "x.jsonl", tickets[:1400]),
        "--batch-size",
        "16",
        "--epochs",
        "1",
    ]
    args += ["--lr", "5e-3"]
    accuracy, printed = learn_and_resume(ranks, "classify", args, tmp_path, stop_at=20, last=60)
    assert accuracy > 0.9
    assert "of 140 texts; by chance 25%" in printed


def test_any_number_of_ranks_trains_the_same(
    ranks: Ranks, tmp_path: Path, tickets: list[str]
) -> None:
    """91 texts in steps of 10: three ranks share them unevenly, and in the last step two of them have none."""
    args = [
        "--data",
        write_rows(tmp_path / "x.jsonl", tickets[:102]),
        "--batch-size",
        "10",
        "--dropout",
        "0",
    ]
    losses, weights, accuracies = [], [], []
    for number, options in ((1, []), (2, ["--accumulate", "2"]), (3, [])):
        folder = tmp_path / f"{number}"
        given = [*args, "--epochs", "1", "--folder", str(folder), *options]
        accuracies.append(ranks(run_example, number, "classify", given, timeout=300)[0][0])
        losses.append(logged(folder, "loss"))
        weights.append(
            {
                name.split("/")[-1]: each
                for name, each in saved_tensors(folder).items()
                if "head" in name
            }
        )
    assert list(losses[0]) == list(range(1, 11))
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=1e-4)
        assert weights[other].keys() == weights[0].keys() != set()
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[other][name], tensor, rtol=1e-3, atol=1e-4)
    assert accuracies[0] == accuracies[1] == accuracies[2]


def make_batches() -> dict[str, Any]:
    batches = import_from("classify", "batches")
    torch.manual_seed(0)
    lengths = torch.randint(1, 100, (1003,)).tolist()
    sampler = batches.LengthBuckets(lengths, 16)
    first, second = list(sampler), list(sampler)
    pad = batches.Padding(7)
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in first]
    sizes = [
        np.mean([lengths[i] for i in batch[:8]]) - np.mean([lengths[i] for i in batch[8:]])
        for batch in first
    ]
    tokens, mask, labels = pad([([1, 2, 3], 0), ([4], 2)])
    words = batches.Vocabulary(["a b a b", "c 12"], size=4)
    return {
        "each": [sorted(index for batch in epoch for index in batch) for epoch in (first, second)],
        "differs": first != second,
        "counts": (len(first), len(sampler)),
        "spread": float(np.mean(spread)),
        "sides": float(np.mean(sizes)),
        "padded": (tokens.tolist(), mask.tolist(), labels.tolist()),
        "words": (len(words), words.encode(["A b c", ""])),
    }


def test_batches_hold_texts_of_similar_length_once(ranks: Ranks) -> None:
    found = ranks(make_batches, 1)[0]
    assert found["each"] == [list(range(1003))] * 2
    assert found["differs"]
    assert found["counts"] == (63, 63)
    assert found["spread"] < 15, "of 99"
    assert abs(found["sides"]) < 2, "no rank always gets the longer ones"
    tokens, mask, labels = found["padded"]
    assert tokens == [[1, 2, 3, 7, 7, 7, 7, 7], [4, 7, 7, 7, 7, 7, 7, 7]]
    assert mask == [[True] * 3 + [False] * 5, [True] + [False] * 7]
    assert labels == [0, 2]
    assert found["words"] == (4, [[2, 3, 1], [1]])


def fine_tune(folder: str, data: str) -> tuple[float, str, bool]:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    rows = [
        json.loads(line)["text"].lower()
        for line in Path(data).read_text(encoding="utf-8").splitlines()
    ]
    words = sorted({word.strip(".,!?") for text in rows for word in text.split()})
    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(ids),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    saved = BertModel(config)
    saved.save_pretrained(folder)
    model = import_from("classify", "model")
    loaded = model.Pretrained(
        folder, labels=["a", "b", "c"]
    ).model.bert.embeddings.word_embeddings.weight
    args = [
        "--hf-model",
        folder,
        "--data",
        data,
        "--batch-size",
        "16",
        "--epochs",
        "1",
        "--lr",
        "1e-3",
    ]
    return *run_example("classify", args), torch.equal(
        loaded, saved.embeddings.word_embeddings.weight
    )


def test_a_local_model_of_hugging_face_is_fine_tuned(
    ranks: Ranks, tmp_path: Path, tickets: list[str]
) -> None:
    data = write_rows(tmp_path / "x.jsonl", tickets[:200])
    accuracy, printed, same_weights = ranks(
        fine_tune, 1, str(tmp_path / "model"), data, timeout=300
    )[0]
    assert same_weights
    assert 0 <= accuracy <= 1
    assert "epoch 1: test accuracy" in printed


def test_its_settings_are_valid(paceline: Any) -> None:
    done = paceline(
        "submit", "--dry-run", "--gpus", "4", "train.py", cwd=EXAMPLES / "classify", check=True
    )
    assert "#SBATCH --time=01:00:00" in done.stdout
