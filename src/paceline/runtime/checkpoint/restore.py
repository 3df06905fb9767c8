"""From a checkpoint into the objects of this run, whatever number of ranks wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import rng, sharded, state_tree
from paceline.runtime.checkpoint.reader import Source

SHOWN = 3  # keys that an error names


def load(
    source: Source,
    objects: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    seed: int,
    new_group: Callable[[], Any],
) -> None:
    """Put the checkpoint's state into the objects and the random generators."""
    kinds = source.marker.objects
    missing = [name for name in objects if name not in kinds]
    if missing:
        raise CheckpointError(
            f"{source.folder.name} holds nothing for {', '.join(map(repr, missing))}; it has {', '.join(kinds)}",
            hint="resume the same objects under the same names, or start a new run from exported weights",
        )
    trees = source.json("objects.json")
    states = _rank_states(source, rank=rank, world_size=world_size)
    # A sharded tensor may be filled only together with all others: it is a collective.
    loader = _Sharded(source, new_group)
    for name, thing in objects.items():
        if kinds[name] != "rank":
            loader.want(name, trees[name], thing)
    loader.load()
    for name, thing in objects.items():
        if kinds[name] == "rank":
            _load_rank_state(name, thing, states, rank=rank)
        else:
            _load_object(name, thing, trees[name], source, loader)
    if world_size == source.marker.world_size:
        rng.restore(state_tree.decode(states[rank]["rng"], state_tree.outline))
    else:
        rng.derive(seed=seed, step=source.marker.step, rank=rank)


def _rank_states(source: Source, *, rank: int, world_size: int) -> dict[int, Any]:
    """What each saved rank kept for itself: only our own when we are as many as it was, else all of it."""
    saved = source.marker.world_size
    wanted = [rank] if saved == world_size else range(saved)
    return {each: source.json(f"state-{each + 1:05d}-of-{saved:05d}.json") for each in wanted}


def _load_rank_state(name: str, thing: Any, states: Mapping[int, Any], *, rank: int) -> None:
    decoded = {
        each: state_tree.decode(state["objects"][name], state_tree.outline) for each, state in states.items()
    }
    with _Explained(name):
        if len(decoded) > 1 and hasattr(thing, "load_rank_states"):
            thing.load_rank_states([decoded[each] for each in sorted(decoded)])
        else:
            thing.load_state_dict(decoded.get(rank, decoded.get(0)))


def _load_object(name: str, thing: Any, saved: Any, source: Source, loader: _Sharded) -> None:
    now = loader.now(name)
    fetched: dict[str, torch.Tensor] = {}

    def fetch(entry: dict[str, Any]) -> Any:
        if "$sharded" in entry:
            return loader.filled[entry["$sharded"]]
        key = entry["$tensor"]
        if key not in fetched:
            fetched[key] = _fit(source.tensor(key), loader.like(key, thing, now))
        return fetched[key]

    state = state_tree.decode(saved, fetch)
    if isinstance(thing, torch.nn.Module) or _is_flat(state):
        _compare(name, state, loader.current(name))
    with _Explained(name):
        thing.load_state_dict(state)


def _fit(whole: torch.Tensor, like: torch.Tensor | None) -> Any:
    dtensor = state_tree.dtensor_class()
    if dtensor is not None and isinstance(like, dtensor) and like.shape == whole.shape:
        return sharded.spread(whole, like)
    return whole


def _is_flat(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(each, torch.Tensor) for each in state.values())
    )


def _compare(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say what does not fit before anything is changed, and say it shortly."""
    lacks = [key for key in now if key not in saved]
    extra = [key for key in saved if key not in now]
    shapes = [
        f"{key} {tuple(saved[key].shape)} instead of {tuple(now[key].shape)}"
        for key in now
        if isinstance(saved.get(key), torch.Tensor) and saved[key].shape != now[key].shape
    ]
    told = [
        f"{what}: {', '.join(keys[:SHOWN])}{f' and {len(keys) - SHOWN} more' if len(keys) > SHOWN else ''}"
        for what, keys in (
            ("missing in the checkpoint", lacks), ("unexpected in the checkpoint", extra), ("of another shape", shapes)
        )
        if keys
    ]  # fmt: skip
    if told:
        raise CheckpointError(
            f"the checkpoint does not fit {name!r}; {'; '.join(told)}",
            hint="resume with the model that was saved, or start a new run",
        )


class _Explained:
    """Whatever load_state_dict objects to, with the object's name before it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if isinstance(error, (KeyError, ValueError, TypeError, RuntimeError)):
            raise CheckpointError(
                f"the checkpoint does not fit {self.name!r}: {type(error).__name__}: {error}",
                hint="resume with the objects that were saved, or start a new run",
            ) from error


class _Sharded:
    """The sharded tensors that the objects ask for, loaded by one collective."""

    def __init__(self, source: Source, new_group: Callable[[], Any]) -> None:
        self.source, self.new_group = source, new_group
        self.filled: dict[str, Any] = {}
        self._now: dict[str, dict[str, torch.Tensor]] = {}
        self._current: dict[str, Any] = {}

    def now(self, name: str) -> dict[str, torch.Tensor]:
        return self._now[name]

    def current(self, name: str) -> Any:
        return self._current[name]

    def want(self, name: str, saved: Any, thing: Any) -> None:
        """Look at what the object holds now, and prepare a place for each sharded tensor it will get."""
        state = self._current[name] = thing.state_dict()
        taken: dict[str, torch.Tensor] = {}

        def take(path: str, tensor: torch.Tensor) -> dict[str, Any]:
            taken[path] = tensor
            return {}

        state_tree.encode(state, name, take)
        self._now[name] = taken

        for entry in state_tree.references(saved):
            key = entry.get("$sharded")
            if key is not None:
                self.filled[key] = sharded.target(entry, self.like(key, thing, taken))

    def like(self, key: str, thing: Any, now: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The tensor that a saved one is cut like: itself, or for an optimizer's state the parameter it is of."""
        if key in now:
            return now[key]
        words = key.split("/")
        groups = getattr(thing, "param_groups", None)
        if groups is None or len(words) != 4 or words[1] != "state" or not words[2].isdigit():
            return None
        parameters = [each for group in groups for each in group["params"]]
        index = int(words[2])
        return parameters[index].detach() if index < len(parameters) else None

    def load(self) -> None:
        if self.filled:
            sharded.read(self.source.folder, self.filled, group=self.new_group())
