"""Redaction: secrets are hidden wherever a person may type them, and nothing else is."""

from __future__ import annotations

import pytest

from paceline.contract.redaction import REDACTED, redact, redact_args, redact_text, redact_values

SECRET = "hu5h-Hush"


@pytest.mark.parametrize(
    "args",
    [
        ["--param=api_key=hu5h-Hush"],
        ["--param", "api_key=hu5h-Hush"],
        ["--set=api_key=hu5h-Hush"],
        ["++api_key=hu5h-Hush"],
        ["+wandb.api_key=hu5h-Hush"],
        ["--extra=--export=API_KEY=hu5h-Hush"],
        ["--extra=--export=A=1,API_KEY=hu5h-Hush"],
        ["--setup=export FOO_TOKEN=hu5h-Hush"],
        ["--setup", "export FOO_TOKEN='hu5h-Hush again'"],
        ["--setup", 'module load a; export FOO_TOKEN="x hu5h-Hush"; run'],
        ["--setup", "login --password hu5h-Hush"],
        ["--storage", "postgres://u:p@hu5h-Hush@h/db"],
        ["--storage=mysql://u:p@hu5h-Hush@h/db"],
        ["--storage", "postgres://u:p/hu5h-Hush@h/db"],
        ["--api-keys", "hu5h-Hush"],
        ["--api_keys=hu5h-Hush"],
        ["--api-key", "-hu5h-Hush"],
        ["--pass", "hu5h-Hush"],
        ["--db-pass=hu5h-Hush"],
        ["--pwd", "hu5h-Hush"],
        ["--auth", "hu5h-Hush"],
        ["--hftoken", "hu5h-Hush"],
        ["--accessKey=hu5h-Hush"],
        ["--AWSSecretKey", "hu5h-Hush"],
        ["--api-key=a=b&hu5h-Hush"],
        ['{"api_key": "hu5h-Hush"}'],
        ["{'lr': 1, 'api_key': 'hu5h-Hush'}"],
        ['--config={"db":{"password":"a b hu5h-Hush"}}'],
        ["API_KEY: hu5h-Hush"],
        ["--header", "Authorization: Bearer hu5h-Hush"],
        ["--header=Authorization: hu5h-Hush"],
        ["-H", "X-Api-Key: hu5h-Hush"],
        ["Bearer 0123456789-hu5h-Hush"],
        ["--url", "https://x.example.org/?sv=1&sig=hu5h-Hush"],
        ["--url=https://x.example.org/?key=hu5h-Hush&x=1"],
        ["https://x.example.org/a?X-Amz-Signature=hu5h-Hush"],
        ["--env", "DB_PASS=hu5h-Hush"],
        ["--env=MYSQL_PWD=hu5h-Hush"],
        ["--env=LINK=https://x.example.org/?sig=hu5h-Hush"],
    ],
)
def test_secrets_in_arguments_are_hidden(args: list[str]) -> None:
    shown = redact_args(args)
    assert len(shown) == len(args)
    assert SECRET not in " ".join(shown)
    assert REDACTED in " ".join(shown)


@pytest.mark.parametrize(
    "line",
    """
    --passes 3 --author X --lr 0.1
    --data /home/ann/keys/a.bin --out=/scratch/token/b
    --password-file /home/ann/pw --token-path=x --openai-key-file f
    --pwd /home/ann/vision
    --two-pass train.py
    --pass 3
    --auth=false
    --auth-type basic
    --max-tokens 512 --tokens 1000 --tokenizer gpt2 --num-tokens=3
    --sort-keys name
    --use-token --lr 0.1
    --use-token -v
    key=len KEY=2 --key=len
    --passthrough on
    --authority ann
    https://example.org/?mail=a@b
    https://example.org/a?page=2&sort=key
    http://proxy:3128/a:b@c
    git+ssh://git@git.example.org/mine.git
    s3://bucket/key/part user@host C:/data/key
    --opts {"lr":0.1,"keys":["a"],"monkey":"x"}
    """.strip().splitlines(),
)
def test_harmless_arguments_stay(line: str) -> None:
    args = line.split()
    assert redact_args(args) == args
    assert redact_text(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=$(cat ~/.hf)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=${MY_TOKEN}; module load cuda",
        "export PATH=/opt/key/bin:$PATH",
        "module load openmpi/4.1",
        "ulimit -n 4096 # a comment: keys, tokens",
        "export TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO",
    ],
)
def test_harmless_lines_of_a_shell_stay(line: str) -> None:
    assert redact_text(line) == line
    assert redact_args(["--setup", line, f"--setup={line}"]) == ["--setup", line, f"--setup={line}"]


def test_only_the_secret_of_a_text_is_hidden() -> None:
    assert redact_text("export A=1 MY_TOKEN='a b' B=2\nfoo --token=x -v") == (
        "export A=1 MY_TOKEN='***' B=2\nfoo --token=*** -v"
    )
    assert redact_text('{"api_key": "x", "lr": 1}') == '{"api_key": "***", "lr": 1}'
    assert redact_text("export MY_TOKEN='$ecret'") == "export MY_TOKEN='***'"  # quotes keep the $
    assert redact_args(["git+https://a:b@git.example.org/m.git@v1"]) == [
        "git+https://***@git.example.org/m.git@v1"
    ]


def test_secrets_in_parameters_and_variables_are_hidden() -> None:
    values = {
        "lr": 0.1,
        "api_keys": ["x", "y"],
        "db": {"url": "postgres://u:p@q@h/db"},
        "name": "ann",
        "pass": "3",
    }
    assert redact_values(values) == {
        "lr": 0.1,
        "api_keys": ["***", "***"],
        "db": {"url": "postgres://***@h/db"},
        "name": "ann",
        "pass": "3",
    }
    assert redact("PWD", "/home/ann") == "/home/ann"
    assert redact("DB_PASS", "x") == REDACTED
