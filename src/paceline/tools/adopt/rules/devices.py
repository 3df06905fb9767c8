"""Devices: each rank has its own, `run.device`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark

REASON = "each rank has its own device"
_CUDA = re.compile(r"cuda(:\d+)?$")


def change_devices(script: Script, run: str) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    """Yield changes, each with the node that it is for. Nodes at the top may run before there is a
    `run`.
    """
    done: set[ast.AST] = set()
    for node in script.nodes:
        if any(each in done for each in (node, *script.ancestors(node))):
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _is_cuda_method(script, node.func)
        ):
            options = [
                script.source.text_of(each) for each in node.keywords if each.arg != "device"
            ]
            text = f"to({', '.join([f'{run}.device', *options])})"
            yield node, script.source.replace_method(node, text, REASON)
            continue
        changed = _replacement(script, node, run)
        if changed is not None:
            done.add(node)
            yield node, script.source.replace(node, changed, REASON)
    for call in script.calls_of("torch.cuda.set_device"):
        if call.args and isinstance(call.args[0], ast.Constant):
            yield call, script.source.replace(call.args[0], f"{run}.device", REASON)
    for node in script.nodes:
        if isinstance(node, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.dump(node.targets[0]):
            yield node, Remark(node.lineno, "remove this: it gives all ranks the same GPUs")
        if isinstance(node, ast.Constant) and _is_cuda(node) and _is_setting(script, node):
            yield (
                node,
                Remark(
                    node.lineno,
                    f"keep this device {node.value!r} without a number, so that each rank uses "
                    "its own",
                ),
            )


def _replacement(script: Script, node: ast.AST, run: str) -> str | None:
    """Return what to write instead of an expression that names a device."""
    if isinstance(node, ast.Call):
        if script.dotted(node.func) == "torch.device" and node.args and _is_choice(node.args[0]):
            return f"{run}.device"
        return None
    if isinstance(node, ast.IfExp) and _is_choice(node):
        return f"{run}.device.type"  # a string, as before; "cuda" is the rank's own GPU
    if isinstance(node, ast.Constant) and _is_cuda(node) and _is_placement(script, node):
        return f"{run}.device"
    return None


def _is_cuda_method(script: Script, method: ast.Attribute) -> bool:
    return method.attr == "cuda" and not script.dotted(method)


def _is_cuda(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _CUDA.match(node.value) is not None
    )


def _is_choice(node: ast.AST) -> bool:
    """Whether this is "cuda", or "cuda" if there is one, else something else."""
    if isinstance(node, ast.IfExp):
        return any(map(_is_choice, (node.body, node.orelse)))
    return _is_cuda(node)


def _is_placement(script: Script, node: ast.Constant) -> bool:
    """Whether a device is where a tensor or a model goes: `x.to("cuda")`, `torch.zeros(3,
    device="cuda")`.
    """
    parent = script.parents[node]
    if isinstance(parent, ast.keyword) and parent.arg in ("device", "map_location"):
        call = script.parents[parent]
        return (
            isinstance(call, ast.Call)
            and bool(script.dotted(call.func))
            and "amp" not in script.dotted(call.func)
        )
    is_to = (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr == "to"
    )
    return is_to and isinstance(parent, ast.Call) and node in parent.args


def _is_setting(script: Script, node: ast.Constant) -> bool:
    """Whether a device is the default of an option, or of a field."""
    parent = script.parents[node]
    return (isinstance(parent, ast.keyword) and parent.arg == "default") or isinstance(
        parent, ast.AnnAssign
    )
