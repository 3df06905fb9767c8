"""What every rank would do once more: devices with a number, files, folders and output. Only the
functions that have the training loop are changed; elsewhere, a remark says what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from paceline.tools.adopt.script import Script, last_name
from paceline.tools.adopt.source_edits import Edit, Remark

DEVICE = "each rank has its own device"
SAVE = "all ranks would write the same file at the same time"
FOLDER = "another rank may have just created it"
PRINT = "once, by rank 0, with its own values"
WRITES = (
    *("torch.save", "torch.jit.save", "safetensors.torch.save_file", "numpy.save", "numpy.savez"),
    *("numpy.savetxt", "matplotlib.pyplot.savefig", "torchvision.utils.save_image"),
    *("shutil.copy", "shutil.copyfile", "shutil.move", "os.rename", "os.replace", "os.remove"),
)
METHODS = ("save_pretrained", "savefig", "write_text", "write_bytes", "to_csv", "to_parquet")
MEMORY = ("tempfile.", "uuid.", "io.")
PLAIN = {"state_dict", "dict", "join", "str", "format", "Path"}  # that one rank may call alone
_CUDA = re.compile(r"cuda(:\d+)?$")
_MODE = re.compile(r"[rbt]*[wax+][wax+bt]*$")


class SideEffects:
    """`is_ready` answers whether the run exists where a node is, in a function that is changed."""

    def __init__(self, script: Script, run: str, is_ready: Callable[[ast.AST], bool]) -> None:
        self.script, self.source, self.run, self.is_ready = script, script.source, run, is_ready

    def find(self) -> Iterator[Edit | Remark]:
        yield from self._devices()
        yield from self._saves()
        yield from self._folders()
        own = "print" in self.script.functions or "print" in self.script.imports
        for call in self.script.calls:
            is_print = isinstance(call.func, ast.Name) and call.func.id == "print" and not own
            to_file = any(each.arg == "file" for each in call.keywords)
            if is_print and not to_file and self.is_ready(call):
                yield self.source.replace(call.func, f"{self.run}.print", PRINT)

    # -- devices

    def _devices(self) -> Iterator[Edit | Remark]:
        done: set[ast.AST] = set()
        for node in self.script.nodes:
            if not done.isdisjoint((node, *self.script.ancestors(node))):
                continue
            if isinstance(node, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.dump(node.targets[0]):
                yield Remark(
                    node.lineno, "remove this: it gives all ranks the same GPUs", must=True
                )
            if (edit := self.device_edit(node)) is not None and self.is_ready(node):
                done |= {node} if edit.start == self.source.start(node) else set()
                yield edit
            elif _has_number(node):
                yield Remark(
                    self.script.statement(node).lineno,
                    "all ranks would use this one GPU: leave out the number, so that each rank "
                    "uses its own",
                    must=True,
                )

    def device_edit(self, node: ast.AST) -> Edit | None:
        """Return the edit for a node that names a device. Defaults of arguments stay."""
        text = ""
        if (
            isinstance(node, ast.Call)
            and last_name(node) == "cuda"
            and not self.script.dotted(node.func)
        ):
            options = [self.source.text_of(each) for each in node.keywords if each.arg != "device"]
            text = f"to({', '.join([f'{self.run}.device', *options])})"
            end = self.source.end(node.func)  # what is before the dot may have edits of its own
            return Edit(end - len("cuda"), self.source.end(node), text, DEVICE)
        if isinstance(node, ast.Call) and self.script.dotted(node.func) == "torch.device":
            text = f"{self.run}.device" if node.args and _is_choice(node.args[0]) else ""
        elif isinstance(node, ast.IfExp) and _is_choice(node):
            text = f"{self.run}.device.type"  # a string, as before; "cuda" is the rank's own GPU
        elif _is_cuda(node):
            call = self.script.parents[node]
            named = isinstance(call, ast.keyword) and call.arg in ("device", "map_location")
            call = self.script.parents[call] if named else call
            known = last_name(call) in ("to", "set_device") or (
                named and self.script.dotted(getattr(call, "func", call)).startswith("torch.")
            )
            is_amp = "amp" in ast.unparse(getattr(call, "func", call))
            text = (
                f"{self.run}.device" if isinstance(call, ast.Call) and known and not is_amp else ""
            )
        above = self.script.ancestors(node)
        if not text or any(isinstance(each, ast.arguments) for each in above):
            return None
        return self.source.replace(node, text, DEVICE)

    # -- files

    def _saves(self) -> Iterator[Edit | Remark]:
        for call in (each for each in self.script.calls if self._writes(each)):
            statement = self.script.statement(call)
            alone = isinstance(statement, ast.Expr) and statement.value is call
            inside = [each for each in ast.walk(call) if isinstance(each, ast.Call)]
            names = {last_name(each) for each in inside if each is not call}
            indent = self.source.indent(statement)
            known = self.script.dotted(call.func) == "torch.save" and names <= PLAIN
            if alone and known and indent is not None and self.is_ready(call):
                head = f"if {self.run}.is_rank_zero:{self.source.newline}"
                start = self.source.start(statement)
                yield Edit(start, start, f"{head}{indent}{self.source.unit}", SAVE)
            else:
                yield Remark(
                    call.lineno,
                    f"all ranks write this file: write it only if {self.run}.is_rank_zero, and "
                    "keep whatever the other ranks need outside",
                    must=last_name(call) != "open",
                )

    def _writes(self, call: ast.Call) -> bool:
        """Whether a call writes a file, other than one of memory or with a name of its own."""
        name, last = self.script.dotted(call.func), last_name(call)
        given = [*call.args, *(each.value for each in call.keywords)]
        if last == "open" and (not name or name in ("io.open", "gzip.open", "codecs.open")):
            return any(_MODE.match(str(getattr(each, "value", ""))) for each in given)
        if name not in WRITES and (name or last not in METHODS):
            return False
        made = {each for one in given for each in self.script.origins(one)}
        return not any(self.script.dotted(each.func).startswith(MEMORY) for each in made)

    def _folders(self) -> Iterator[Edit | Remark]:
        """A folder that several ranks make at once must be allowed to exist."""
        for call in self.script.calls:
            name = self.script.dotted(call.func)
            path = last_name(call) == "mkdir" and not name
            known = any(each.arg in ("exist_ok", None) for each in call.keywords)
            tried = any(isinstance(each, ast.Try) for each in self.script.ancestors(call))
            if known or tried or not (path or name in ("os.makedirs", "os.mkdir", "shutil.rmtree")):
                continue
            if name == "shutil.rmtree":
                yield Remark(
                    call.lineno,
                    "all ranks remove this folder, even while others use it: do it on one only",
                    must=True,
                )
            elif self.is_ready(call) and name != "os.mkdir":
                yield self.source.add_argument(call, "exist_ok=True", FOLDER)
            else:
                yield Remark(
                    call.lineno, f"{FOLDER}: use os.makedirs(..., exist_ok=True)", must=True
                )


def _is_cuda(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and _CUDA.match(value) is not None


def _is_choice(node: ast.AST) -> bool:
    """Whether this is "cuda", or "cuda" if there is one, else something else."""
    if isinstance(node, ast.IfExp):
        return _is_choice(node.body) or _is_choice(node.orelse)
    return _is_cuda(node)


def _has_number(node: ast.AST) -> bool:
    """Whether this names one GPU: "cuda:0", `.cuda(0)`."""
    if isinstance(node, ast.Call) and last_name(node) in ("cuda", "set_device") and node.args:
        return isinstance(getattr(node.args[0], "value", None), int)
    return isinstance(node, ast.Constant) and _is_cuda(node) and ":" in str(node.value)
