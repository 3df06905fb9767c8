"""A new project: its templates, and the files that are made from one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

FILES = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Template:
    """One template. `quick` are the arguments with which its test trains; `result` is what the
    script prints last.
    """

    about: str  # one line for --help
    title: str  # what the project does, for its README
    files: tuple[str, ...]  # from the folder of its example
    reaches: str  # on two CPU cores
    data: str  # what it trains on, and how to use more
    quick: str
    result: str = "final test accuracy"
    example: str = ""  # the folder in examples/; `blank` has none
    arguments: tuple[str, ...] = ()  # of `paceline run`, without any other
    settings: str = ""  # more lines of paceline.toml

    @property
    def folder(self) -> Path:
        """Where its files are: in the wheel, or in a checkout."""
        if not self.example:
            return FILES / "blank"
        packed = FILES / "examples" / self.example
        return packed if packed.is_dir() else Path(__file__).parents[4] / "examples" / self.example


DIGITS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
GRACE = '\n[resume]\ngrace = "2m"   # how long before the time limit the ranks are asked to save\n'

TEMPLATES: Mapping[str, Template] = {
    "blank": Template(
        "a short loop with made-up data: replace its model and its data with yours",
        "A short training loop. Replace the network, the data and the loss with yours; the rest "
        "of `main` can stay.",
        ("train.py", "requirements.txt"),
        "reaches a test error below 0.01 in about 5 s",
        "The script makes up its data. Replace `make_data` with your dataset.",
        quick="--epochs 1",
        result="final test error",
    ),
    "mnist": Template(
        "a network for handwritten digits",
        "A small network that reads handwritten digits.",
        (
            "train.py",
            "digits.py",
            "requirements.txt",
            *(f"data/{name}-ubyte.xz" for name in DIGITS),
        ),
        "reads more than 90% of the test digits in about 30 s",
        "`data/` has a sixth of MNIST. For all of it, run `paceline run train.py --download`: it "
        "downloads the images"
        " to `mnist-data` once. On a cluster whose nodes have no internet, copy that folder "
        "there, and use"
        " `--data-dir /path/to/mnist-data`.",
        quick="--dry-run",
        example="mnist",
        arguments=("--epochs", "1"),
    ),
    "text": Template(
        "a small GPT-2 on your text files",
        "A language model with the architecture of GPT-2, from 120,000 to 124 million parameters.",
        ("train.py", "loss.py", "model.py", "stories.py", "tokens.py", "requirements.txt"),
        "gets to a perplexity below 2 per byte in about 40 s",
        "Without `--data`, the script makes up stories. Use your own text with `paceline run "
        "train.py --data FILE`, or"
        " a folder of `.txt` files, and `--tokenizer bpe` for a large one.",
        quick="--steps 4 --sample 10",
        result="final perplexity",
        example="text",
    ),
    "classify": Template(
        "a classifier of labelled texts, from scratch or fine-tuned",
        "A classifier of labelled texts, trained from scratch or fine-tuned from Hugging Face.",
        ("train.py", "batches.py", "model.py", "tickets.py", "requirements.txt"),
        "labels 95% of the test messages correctly in about 30 s",
        "Without `--data`, the script makes up messages. Use your own with `paceline run train.py "
        "--data FILE`: a"
        ' `.csv` or `.jsonl` file with "text" and "label". `--hf-model distilbert-base-uncased` '
        "fine-tunes a model.",
        quick="--epochs 1",
        example="classify",
        settings="\n[environment.variables]\n"
        'TOKENIZERS_PARALLELISM = "false"   # its threads do not survive the fork of data-loader '
        "workers\n",
    ),
    "stream": Template(
        "a stream of unequal shards, for data that is too large to index",
        "Training on a stream of shards that differ in length. Each rank and each of its workers "
        "reads its own.",
        ("train.py", "requirements.txt"),
        "classifies 95% of the points correctly in about 10 s",
        "The script writes shards of made-up points into the run folder. Replace `make_shards` "
        "with a list of your"
        " files, and adapt how `Shards` reads lines to your format.",
        quick="--epochs 1 --shards 4",
        example="stream",
    ),
    "lightning": Template(
        "Lightning's Trainer",
        "Lightning's Trainer. It saves when Paceline stops it, and resumes.",
        ("train.py", "points.py", "requirements.txt"),
        "classifies 95% of the points correctly in about 30 s",
        "`points.py` makes up its data. Replace `spirals` with your dataset.",
        quick="--epochs 1 --samples 320",
        example="lightning",
        settings=f'\n[launch]\nstyle = "lightning"\n{GRACE}',
    ),
    "accelerate": Template(
        "a loop with Accelerate",
        "A training loop with Accelerate. It saves when Paceline stops it, and resumes.",
        ("train.py", "requirements.txt"),
        "classifies 95% of the points correctly in about 15 s",
        "The script makes up its data. Replace `spirals` with your dataset.",
        quick="--epochs 1 --samples 320",
        example="accelerate",
        settings=f'\n[launch]\nstyle = "accelerate"\n{GRACE}',
    ),
    "hf": Template(
        "Hugging Face's Trainer",
        "Hugging Face's Trainer with a tiny GPT-2, which is built from a configuration: nothing "
        "is downloaded.",
        ("train.py", "sentences.py", "requirements.txt"),
        "gets to a perplexity below 3, from 14, in about 30 s",
        "`sentences.py` makes up its data. Replace `samples` with your dataset, with "
        "`datasets.load_dataset` for"
        " example, and the model with `AutoModelForCausalLM.from_pretrained`.",
        quick="--steps 4",
        result="final perplexity",
        example="hf_trainer",
        settings=GRACE,
    ),
}


MAX_NAME = 64
# Git and the builder of the wheel would obey files with their real names.
COMMON = {
    "paceline.toml": "paceline.toml",
    "README.md": "README.md",
    "env.template": ".env.template",
    "gitignore": ".gitignore",
    "tests/test_train.py": "tests/test_train.py",
}


def find_template(name: str) -> Template:
    if name in TEMPLATES:
        return TEMPLATES[name]
    raise UsageError(
        f"There is no template {name!r}.", hint=f"The templates are {', '.join(TEMPLATES)}."
    )


def check_name(name: str) -> None:
    """Reject what is no good name of a folder, on any system and for any shell."""
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} is the name of a script, not of a project.",
            hint=f"Choose a new folder, e.g. `paceline new {name[:-3] or 'digits'}`. For an "
            "existing script, use `paceline adopt`.",
        )
    if not re.fullmatch(r"[^\W_][\w.-]*(?<!\.)", name) or len(name) > MAX_NAME:
        raise UsageError(
            f"{name!r} is not a name for a project.",
            hint=f"Use letters, digits, '_', '-' and '.', at most {MAX_NAME}, and begin with a "
            "letter or a digit. To create it elsewhere, `cd` there first. For an existing project, "
            "use `paceline init` and `paceline adopt train.py`.",
        )


def create_project(name: str, template: Template, parent: Path) -> list[str]:
    """Make the folder `name` in `parent`; return its files."""
    check_name(name)
    folder = parent / name
    if os.path.lexists(folder):
        raise UsageError(
            f"A file or folder named {name} already exists.",
            hint="Choose another name; nothing was changed.",
        )
    words = _words(name, template)
    contents = {path: (template.folder / path).read_bytes() for path in template.files}
    for source, path in COMMON.items():
        text = (FILES / "common" / source).read_text(encoding="utf-8")
        filled = re.sub(r"@(\w+)@", lambda match: words[match[1]], text)
        contents[path] = filled.encode()
    for path, content in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return sorted(contents)


def _words(name: str, template: Template) -> dict[str, str]:
    """Return what the common files leave open: `@name@` and so on."""
    command = ["train.py", *template.arguments]
    return {
        "name": name,
        "script": json.dumps(command if template.arguments else command[0]),
        "settings": template.settings,
        "title": template.title,
        "reaches": template.reaches,
        "data": template.data,
        "quick": template.quick,
        "result": template.result,
    }
