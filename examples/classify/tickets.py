"""Generated messages to a shop's support, labelled with the team that should answer them.

`python tickets.py > tickets.jsonl` writes them. The same seed gives the same messages. Most of each
message is small talk, or about other teams' work, so no single word gives the label away.
"""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path

# Sentences by team. Each message has one or two of its team.
TEAMS = {
    "billing": [
        "I was charged {twice} for order {number}.",
        "The invoice {number} shows the wrong amount.",
        "Please send me a receipt for {month}.",
        "When do I get my money back?",
        "My card was declined {again}.",
        "The discount is missing on my bill.",
    ],
    "shipping": [
        "My parcel {number} has not arrived {again}.",
        "The tracking page shows nothing since {month}.",
        "The courier left the box at the wrong door.",
        "Can you deliver to another address?",
        "The package was empty when it came.",
        "Delivery takes {twice} as long as promised.",
    ],
    "account": [
        "I cannot sign in {again}.",
        "The reset link for my password does not work.",
        "Please change the email of user {number}.",
        "How do I delete my profile?",
        "Somebody else uses my login since {month}.",
        "The code for my phone never comes.",
    ],
    "product": [
        "The {thing} stopped working in {month}.",
        "A part of the {thing} is broken.",
        "Does the {thing} fit model {number}?",
        "The manual does not explain how to clean the {thing}.",
        "My {thing} makes a strange noise {again}.",
        "The battery of the {thing} is empty after an hour.",
    ],
}

ASIDES = {
    "billing": ["I have paid already, so that is not it.", "The invoice is fine, thank you."],
    "shipping": ["The parcel came on time, no problem there.", "Delivery was quick, I must say."],
    "account": ["Signing in works, by the way.", "My password is not the problem."],
    "product": ["The {thing} itself is great.", "There is nothing wrong with the {thing}."],
}

TALK = [
    "Hello!",
    "Good {day}.",
    "I hope you are well.",
    "I have been a customer since {month}.",
    "Thanks for your help.",
    "I wrote to you in {month} and got no answer.",
    "Please reply soon.",
    "This is the {number} time that I ask.",
    "My friends told me about your shop.",
    "I am not happy with this.",
    "Have a nice {day}.",
    "Best wishes.",
]

WORDS = {
    "twice": ["twice", "three times"],
    "again": ["again", "this week", "since yesterday", "for days"],
    "month": ["January", "March", "May", "July", "October", "December"],
    "thing": ["kettle", "lamp", "toaster", "speaker", "radio", "drill"],
    "day": ["morning", "day", "evening"],
}


def write_message(draw: random.Random) -> tuple[str, str]:
    """Return a message and its team."""
    team = draw.choice(list(TEAMS))
    others = [other for other in TEAMS if other != team]
    sentences = draw.sample(TEAMS[team], draw.randint(1, 2))
    sentences += [draw.choice(ASIDES[other]) for other in draw.sample(others, draw.randint(0, 2))]
    # a few are long, most are short
    sentences += draw.sample(TALK, min(len(TALK), int(draw.expovariate(0.3))))
    draw.shuffle(sentences)

    def fill(match: re.Match[str]) -> str:
        return str(draw.randint(2, 9999)) if match[1] == "number" else draw.choice(WORDS[match[1]])

    return re.sub(r"\{(\w+)\}", fill, " ".join(sentences)), team


def tickets(count: int = 4000, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return pairs of a message and its label."""
    draw = random.Random(seed)
    return [write_message(draw) for _ in range(count)]


def read(path: Path | None) -> list[tuple[str, str]]:
    """Read texts and labels from a file: JSON Lines or CSV with "text" and "label". Without one,
    make them up.
    """
    if path is None:
        return tickets()
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file)
        return [(row["text"], str(row["label"])) for row in rows]


if __name__ == "__main__":
    for text, label in tickets():
        print(json.dumps({"text": text, "label": label}))
