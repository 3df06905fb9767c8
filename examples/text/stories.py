"""Short stories in plain English, generated from a grammar, to train on when you have no text of
your own.

`python stories.py > stories.txt` writes them. The same seed gives the same stories. A story keeps
its people, place and object until the end, so a model that looks back predicts better than one that
knows only which word follows which.
"""

from __future__ import annotations

import random
import re

# What {name} may become. Names that begin with a capital are chosen once for each story, and stay
# the same in it.
GRAMMAR = {
    "story": [
        "{start} {wish} {trouble} {help} {end}",
        "{start} {detail} {trouble} {detail} {end}",
        "{start} {wish} {detail} {trouble} {detail} {help} {end}",
    ],
    "start": [
        "Once there was a {Kind} named {Hero}, who lived {Place}.",
        "{Hero} was a {Kind} who lived {Place}.",
        "In the old days, a {Kind} named {Hero} had a house {Place}.",
    ],
    "wish": [
        "{Hero} wanted nothing more than {Thing}.",
        "Every {time}, {Hero} dreamed of {Thing}.",
        "People said that {Thing} would bring luck to a {Kind}.",
    ],
    "detail": [
        "In the {time}, {Hero} went to the {spot} to {work}.",
        "The {spot} was {mood} at that time of the year.",
        "{Friend} came by in the {time}, and they had {food} together.",
        "It was a {mood} {time}, and the wind came from the {side}.",
        "{Hero} liked to {work} there, and so did {Friend}.",
    ],
    "trouble": [
        "But one {time}, {Thing} was gone.",
        "One {time}, {Hero} lost {Thing} near the {spot}.",
        'Then {Friend} came running. "Have you seen {Thing}?" cried {Friend}.',
        "Then came a storm from the {side}, and it carried {Thing} away.",
    ],
    "help": [
        '"I will help you," said {Friend}, "if you {work} for me."',
        "{Hero} asked {Friend} for help, and {Friend} knew what to do.",
        "So {Hero} and {Friend} looked for {Thing}, first at the {spot} and then at the {spot}.",
        'They asked a {mood} old woman. "Look {Place}," she said.',
    ],
    "end": [
        "They found {Thing} {Place}, and {Hero} was {mood} no more.",
        "At last {Hero} had {Thing} again, and they all had {food}.",
        "{Hero} never found {Thing}, but {Friend} stayed, and that was better.",
        "From that {time} on, {Hero} and {Friend} were the best of friends.",
    ],
    "Hero": [
        "Ada",
        "Bruno",
        "Clara",
        "Edgar",
        "Flora",
        "Henrik",
        "Ida",
        "Jonas",
        "Lena",
        "Matti",
        "Nora",
        "Oskar",
    ],
    "Friend": [
        "the fox",
        "the miller",
        "the ferryman",
        "the neighbour",
        "the heron",
        "the baker",
        "the old goat",
    ],
    "Kind": [
        "weaver",
        "fisherman",
        "shepherd",
        "clockmaker",
        "potter",
        "beekeeper",
        "carpenter",
        "gardener",
    ],
    "Place": [
        "by the river",
        "on the hill",
        "at the edge of the wood",
        "near the harbour",
        "behind the mill",
    ],
    "Thing": [
        "the silver key",
        "the red lantern",
        "the small boat",
        "the blue cup",
        "the old flute",
        "the golden needle",
    ],
    "time": ["morning", "evening", "summer", "winter", "night", "autumn"],
    "spot": ["market", "well", "bridge", "field", "orchard", "church", "mill", "shore"],
    "work": [
        "mend the nets",
        "gather apples",
        "carry water",
        "sing",
        "cut the grass",
        "watch the birds",
        "bake bread",
    ],
    "food": [
        "soup and bread",
        "apples and cheese",
        "a pot of tea",
        "fish from the river",
        "warm milk",
    ],
    "mood": ["quiet", "cold", "merry", "lonely", "grey", "bright", "strange", "sad"],
    "side": ["north", "south", "east", "west", "sea"],
}


def tell(draw: random.Random) -> str:
    """Return one story."""
    kept: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in kept:
            text = expand(draw.choice(GRAMMAR[name]))
            if name[0].islower():
                return text
            kept[name] = text
        return kept[name]

    def expand(text: str) -> str:
        return re.sub(r"\{(\w+)\}", fill, text)

    return re.sub(r"(?<=\. )[a-z]", lambda first: first[0].upper(), expand("{story}"))


def stories(count: int = 1500, *, seed: int = 0) -> str:
    """Return stories, one per line, about 350 bytes each."""
    draw = random.Random(seed)
    return "".join(f"{tell(draw)}\n" for _ in range(count))


if __name__ == "__main__":
    print(stories(), end="")
