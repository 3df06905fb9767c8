"""What every rank would do once more: devices with a number, files, folders and output. Only the
functions that have the training loop are changed; elsewhere, a remark says what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from paceline.tools.adopt.script import Script, last_name
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import loss_of

DEVICE = "each rank has its own device"
SAVE = "all ranks would write the same file at the same time"
FOLDER = "another rank may have just created it"
PRINT = "once, by rank 0, with its own values"
# the file is the second argument of these, or the first one
PATH_SECOND = (
    *("torch.save", "torch.jit.save", "json.dump", "pickle.dump", "yaml.dump"),
    *("safetensors.torch.save_file", "torchvision.utils.save_image"),
    *("shutil.copy", "shutil.copyfile", "shutil.move", "os.rename", "os.replace"),
)
PATH_FIRST = (
    *("numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt", "cv2.imwrite"),
    *("matplotlib.pyplot.savefig", "os.remove", "os.unlink"),
)
METHODS = ("save_pretrained", "savefig", "write_text", "write_bytes", "to_csv", "to_parquet")
MEMORY = ("tempfile.", "uuid.", "io.")
# What one rank may call alone: nothing that ranks do together, or that changes objects.
HARMLESS = re.compile(
    r"(?:str|int|float|repr|len|list|dict|tuple|sorted|range|zip|enumerate|sum|min|max|round|vars|"
    r"format|open|state_dict|item|cpu|detach|clone|numpy|tolist|join|write|writelines|writerows?|"
    r"writeheader|writer|DictWriter|dumps?|items|keys|values|get|mean|isoformat|strftime|now|close|"
    r"asdict|Path|tensor|get_rng_state|time|flush|save\w*|write_text|write_bytes|imwrite|to_\w+)$"
)
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
                text = "remove this: it gives all ranks the same GPUs"
                yield Remark(node.lineno, text, must=True)
            if (edit := self.device_edit(node)) is not None and self.is_ready(node):
                done |= {node} if edit.start == self.source.start(node) else set()
                yield edit
            elif _has_number(node):
                text = "all ranks would use this one GPU: leave out the number, so that each rank "
                line = self.script.statement(node).lineno
                yield Remark(line, f"{text}uses its own", must=True)

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
            return self.source.replace_method(node, text, DEVICE)
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
        done: set[ast.AST] = set()
        for call in self.script.calls:
            target = self._target(call)
            if target is None or self._is_own(target):
                continue
            statement = self._whole(self.script.statement(call))
            if not done.isdisjoint((statement, *self.script.ancestors(statement))):
                continue
            done.add(statement)
            if self.is_ready(call) and self._may_move(statement, call):
                yield from self.source.under(statement, f"if {self.run}.is_rank_zero:", SAVE)
            else:
                text = f"all ranks write this file: write it only if {self.run}.is_rank_zero, and "
                text += "keep whatever the other ranks need outside"
                yield Remark(call.lineno, text, must=last_name(call) != "open")

    def _target(self, call: ast.Call) -> ast.expr | None:
        """Return the file that a call writes; None if it writes none."""
        name, last = self.script.dotted(call.func), last_name(call)
        keywords = {each.arg: each.value for each in call.keywords}
        given = [*call.args, *keywords.values(), call]
        if last == "open" and (not name or name in ("io.open", "gzip.open", "codecs.open")):
            own = isinstance(call.func, ast.Attribute) and not name  # Path(...).open("w")
            modes = [
                *call.args[0 if own else 1 :][:1],
                *([keywords["mode"]] if "mode" in keywords else []),
            ]
            writes = any(_MODE.match(str(getattr(each, "value", ""))) for each in modes)
            return given[0] if writes else None
        if name in PATH_SECOND:
            return given[1] if len(given) > 2 else None
        is_method = last in METHODS and (not name or name.startswith("matplotlib."))
        if last.startswith("to_") and not call.args:
            return None  # returns a text
        return given[0] if name in PATH_FIRST or is_method else None

    def _is_own(self, target: ast.expr) -> bool:
        """Whether this is memory, or a file with a name of its own, or one that is open: then,
        opening it is what counts.
        """
        calls = {node for node in ast.walk(target) if isinstance(node, ast.Call)}
        calls |= self.script.origins(target)
        names = [self.script.dotted(each.func) for each in calls]
        own = any(name.startswith(MEMORY) or name == "os.getpid" for name in names)
        return own or any(self._target(each) is not None for each in calls)

    def _whole(self, statement: ast.stmt) -> ast.stmt:
        """Return the `with open(...)` around a statement that writes to that file."""
        parent = self.script.parents.get(statement)
        if isinstance(parent, ast.With):
            calls = [each.context_expr for each in parent.items]
            if any(isinstance(each, ast.Call) and self._target(each) is not None for each in calls):
                return self._whole(parent)
        return statement

    def _may_move(self, statement: ast.stmt, call: ast.Call) -> bool:
        """Whether other ranks need nothing that a statement does, and nothing in it is done by all
        ranks together.
        """
        if isinstance(statement, ast.Expr):
            value = statement.value
            outer = isinstance(value, ast.Call) and (value is call or self._target(value) is call)
            if not outer and getattr(getattr(value, "func", None), "value", None) is not call:
                return False
        elif not isinstance(statement, ast.With):
            return False
        nodes = list(ast.walk(statement))
        leaves = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Yield, ast.Global)
        if any(isinstance(node, (*leaves, ast.FunctionDef)) or loss_of(node) for node in nodes):
            return False
        stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        if not all(isinstance(node, (ast.Name, ast.Tuple)) for node in stored):
            return False
        if not all(self._is_harmless(node) for node in nodes if isinstance(node, ast.Call)):
            return False
        bound = {node.id for node in stored if isinstance(node, ast.Name)}
        scope = self.script.function_of(statement) or self.script.tree
        read = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id in bound]
        return set(read) <= set(nodes)

    def _is_harmless(self, call: ast.Call) -> bool:
        own = isinstance(call.func, ast.Name) and call.func.id in self.script.functions
        return not own and HARMLESS.match(last_name(call)) is not None

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
                text = "all ranks remove this folder, even while others use it: do it on one only"
                yield Remark(call.lineno, text, must=True)
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
