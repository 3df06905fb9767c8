"""A script as `adopt` reads it, and signs that it is distributed already: then it runs as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeAlias

from paceline.contract.frameworks import PRESETS, Preset
from paceline.tools.adopt.source_edits import Remark, Source

PROGRESS = ("tqdm", "track")
# what a loop may have around the loader that it reads
WRAPPERS = ("enumerate", *PROGRESS, "iter", "list", "zip")
MOVES = ("to", "cuda", "cpu", "train", "eval", "half", "float", "double")
MAX_DEPTH = 12

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode: TypeAlias = ast.For | ast.While
Scope: TypeAlias = "Function | ast.ClassDef | None"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def last_name(node: ast.AST) -> str:
    """Return `step` of `optimizer.step(...)`, `optimizer.step` or `step`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unwrap(node: ast.expr, wrappers: tuple[str, ...] = WRAPPERS) -> ast.expr:
    """Return what a loop really reads: `loader` of `enumerate(tqdm(loader))`."""
    while isinstance(node, ast.Call) and node.args and last_name(node) in wrappers:
        node = node.args[0]
    return node


class Script:
    """A source, and the relations between its parts. Branches are not told apart: a value may come
    from each of them.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.tree = source, source.tree
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imports = _imports(self.tree)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.functions: dict[str, Function] = {}  # by name
        self.methods: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, FUNCTIONS):
                if isinstance(self.parents[node], ast.ClassDef):
                    self.methods.setdefault(node.name, []).append(node)
                else:
                    self.functions[node.name] = node
        self.names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.names |= {*self.functions, *self.classes, *self.imports}
        self._globals = {
            (self.function_of(node), name)
            for node in self.nodes
            if isinstance(node, ast.Global)
            for name in node.names
        }
        self._values: dict[tuple[Scope, str], list[tuple[ast.expr, int | None]]] = {}
        for node in self.nodes:
            self._record(node)
        self.callers: dict[Function, list[ast.Call]] = {}
        for call in self.calls:
            for function in self.callees(call):
                self.callers.setdefault(function, []).append(call)

    # -- names and structure

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of what an expression refers to: `optim.SGD` is "torch.optim.SGD";
        "" if unknown.
        """
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def calls_of(self, *names: str) -> list[ast.Call]:
        return [call for call in self.calls if self.dotted(call.func) in names]

    def packages(self) -> set[str]:
        return {name.split(".")[0] for name in self.imports.values()}

    def is_module_class(self, node: ast.ClassDef) -> bool:
        """Whether a class is an nn.Module."""
        bases = [self.dotted(base) or last_name(base) for base in node.bases]
        local = [self.classes[base] for base in bases if base in self.classes and base != node.name]
        return any(base.endswith("Module") for base in bases) or any(
            map(self.is_module_class, local)
        )

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that holds a node."""
        return next(each for each in (node, *self.ancestors(node)) if isinstance(each, ast.stmt))

    def function_of(self, node: ast.AST) -> Function | None:
        return next((each for each in self.ancestors(node) if isinstance(each, FUNCTIONS)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    def loop_around(self, node: ast.AST) -> LoopNode | None:
        """Return the innermost loop around a node, in the same function."""
        for each in self.ancestors(node):
            if isinstance(each, (ast.For, ast.While)):
                return each
            if isinstance(each, (*FUNCTIONS, ast.ClassDef)):
                return None
        return None

    @property
    def guard(self) -> ast.If | None:
        """`if __name__ == "__main__":`."""
        for node in self.tree.body:
            if isinstance(node, ast.If) and "'__name__'" in ast.dump(node.test):
                return node
        return None

    # -- calls

    def callees(self, call: ast.Call) -> list[Function]:
        """Return the functions of this script that a call may call."""
        name = call.func
        if isinstance(name, ast.Name):
            if name.id in self.classes:
                body = self.classes[name.id].body
                own = [each for each in body if isinstance(each, FUNCTIONS)]
                return [each for each in own if each.name == "__init__"]
            return [self.functions[name.id]] if name.id in self.functions else []
        if not isinstance(name, ast.Attribute) or self.dotted(name):
            return []
        found = self.methods.get(name.attr, [])
        made = {last_name(each) for each in self.origins(name.value)} if found else set()
        known = [self.classes[each] for each in made if each in self.classes]
        if made and not known:  # `model.train()` is not the `train` of a Trainer
            return []
        return [each for each in found if not known or self.parents[each] in known]

    def repeats(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a node may run more than once: in a loop, or in a function that is called
        several times.
        """
        if self.loop_around(node) is not None:
            return True
        function = self.function_of(node)
        if function is None or depth > MAX_DEPTH:
            return False
        callers = self.callers.get(function, [])
        return len(callers) > 1 or any(self.repeats(call, depth + 1) for call in callers)

    # -- values

    def values(self, text: str, near: ast.AST) -> list[ast.expr]:
        """Return what is assigned to a name or to `self.name`, as seen from a node."""
        return [value for value, _ in self._values.get((self.scope(text, near), text), [])]

    def scope(self, text: str, near: ast.AST) -> Scope:
        """Return the function or class whose name this is; None for the module."""
        if "." in text:
            return self.class_of(near)
        function = self.function_of(near)
        while function is not None:
            if (function, text) in self._values or text in parameters(function):
                return function
            function = self.function_of(function)
        return None

    def assigned_in(self, scope: Scope) -> list[str]:
        """Return the names that a function, a class or the module assigns itself."""
        return list(dict.fromkeys(name for owner, name in self._values if owner is scope))

    def origins(self, node: ast.expr) -> set[ast.Call]:
        """Return the calls that an expression's value may come from: through names, attributes,
        parameters, returned values, and wrappers such as `tqdm`.
        """
        return set(self._find(node, None, set()))

    def _find(
        self, node: ast.expr, index: int | None, seen: set[tuple[ast.AST, int | None]]
    ) -> Iterator[ast.Call]:
        """Search on; `index` is the part of a tuple that is wanted."""
        if (node, index) in seen:
            return
        seen.add((node, index))
        sources: list[tuple[ast.expr, int | None]] = []
        if isinstance(node, (ast.Tuple, ast.List)):
            chosen = node.elts if index is None else node.elts[index : index + 1]
            sources = [(each, None) for each in chosen]
        elif isinstance(node, ast.IfExp):
            sources = [(node.body, index), (node.orelse, index)]
        elif isinstance(node, ast.Name):
            sources = self._sources_of_name(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # of `self` here, or of an object of any class
            named = [
                each for (_, name), each in self._values.items() if name == f"self.{node.attr}"
            ]
            sources = [each for values in named for each in values]
        elif isinstance(node, ast.Subscript):
            sources = [(each, None) for each in self._items(node)]
        elif isinstance(node, ast.Call) and (inner := unwrap(node)) is not node:
            sources = [(inner, None)]
        elif isinstance(node, ast.Call):
            yield node
            if isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
                sources = [(node.func.value, None)]
            called = self.functions.get(last_name(node)) if last_name(node) else None
            if called is not None and isinstance(node.func, ast.Name):
                given = [each for each in ast.walk(called) if isinstance(each, ast.Return)]
                sources = [(each.value, index) for each in given if each.value is not None]
        for source, part in sources:
            yield from self._find(source, part, seen)

    def _sources_of_name(self, node: ast.Name) -> list[tuple[ast.expr, int | None]]:
        scope = self.scope(node.id, node)
        found = list(self._values.get((scope, node.id), []))
        if isinstance(scope, FUNCTIONS):
            names = parameters(scope)
            for call in self.callers.get(scope, []) if node.id in names else []:
                first = 1 if names[0] in ("self", "cls") else 0
                place = names.index(node.id) - first
                found += [(each.value, None) for each in call.keywords if each.arg == node.id]
                found += [(each, None) for each in call.args[place : place + 1] if place >= 0]
        return found

    def _items(self, node: ast.Subscript) -> list[ast.expr]:
        """Return an entry of a dictionary that is written as one: all of them if it is not clear
        which one.
        """
        found = []
        wanted = node.slice.value if isinstance(node.slice, ast.Constant) else None
        for value in self.values(ast.unparse(node.value), node):
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                found += [
                    each for key, each in pairs if wanted in (None, getattr(key, "value", None))
                ]
        return found

    def _record(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For):
            self._assign(node.target, ast.Constant(None))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr)

    def _assign(self, target: ast.expr, value: ast.expr, index: int | None = None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for position, part in enumerate(target.elts):
                self._assign(part, value, position)
            return
        text, scope = ast.unparse(target), self.function_of(target)
        if isinstance(target, ast.Attribute) and text == f"self.{target.attr}":
            self._values.setdefault((self.class_of(target), text), []).append((value, index))
        elif isinstance(target, ast.Name):
            owner = None if (scope, text) in self._globals else scope
            self._values.setdefault((owner, text), []).append((value, index))


def parameters(function: Function) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def assigns(statement: ast.stmt, text: str) -> bool:
    """Whether a statement certainly gives a name a value, or leaves."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(ast.unparse(each) == text for target in targets for each in _parts(target))
    if isinstance(statement, (ast.Return, ast.Raise)):
        return True
    bodies = [statement.body] if isinstance(statement, (ast.With, ast.Try)) else []
    if isinstance(statement, ast.If):
        bodies = [statement.body, statement.orelse]
    if isinstance(statement, ast.Try):
        bodies += [each.body for each in statement.handlers]
    return bool(bodies) and all(any(assigns(each, text) for each in body) for body in bodies)


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


# -- signs of distribution -------------------------------------------------------------------------


FRAMEWORKS = {  # package, and the name of the framework
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Lightning Fabric",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "colossalai": "Colossal-AI",
    "composer": "Composer",
    "fairscale": "FairScale",
    "megatron": "Megatron",
    "ray": "Ray",
    "torch_xla": "PyTorch/XLA",
}
RANK = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
VARIABLES = (
    *RANK,
    *RANK.values(),
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_NAME = re.compile(
    r"(?i)(\w*distributed(?!sampler_\w)\w*|(?:init_|setup_|use_|is_)?f?s?ddp\d?|fsdp\d?|fully_shard"
    r"|local_rank|world_size|get_(?:local_)?rank|init_device_mesh|device_?mesh|parallelize_module"
    r"|init_process_group|rank_zero_only|(?:is_)?main_process|tensor_parallel)$"
)
_OPTION = re.compile(r"--(local[_-]rank|world[_-]size|distributed|dist[_-]\w+)$")
SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_FIXED = re.compile(r"tcp://[\w.-]+:\d+")


def framework_of(script: Script, preset: Preset | None) -> str:
    """Return the name of the framework that starts or joins the ranks; "" if there is none."""
    known = sorted(FRAMEWORKS[each] for each in script.packages() & FRAMEWORKS.keys())
    return f"the {preset.name}" if preset is not None else next(iter(known), "")


def preset_of(script: Script) -> Preset | None:
    """Return the framework whose trainer a script uses, if it does not train in a loop itself."""
    text = script.source.text
    own = any(last_name(call) == "backward" for call in script.calls)
    return next((each for each in PRESETS if each.fits(text) and not own), None)


def sign_of(script: Script) -> tuple[int, str] | None:
    """Return the first sign that a script is distributed: its line, and what is there."""
    found = []
    for node in script.nodes:
        given = (_identifier(node), *_imported(node))
        names = [name for name in given if any(map(_NAME.match, name.split(".")))]
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and (value in VARIABLES or _OPTION.match(value)):
            names.append(value)
        if isinstance(node, ast.Call) and script.dotted(node.func) in SPAWN:
            names.append("torch.multiprocessing")
        if names:
            found.append((getattr(node, "lineno", 1), names[0]))
    return min(found, default=None)


def _identifier(node: ast.AST) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    return last_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _imported(node: ast.AST) -> list[str]:
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return []
    names = [alias.name for alias in node.names]
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return names


def needs_spawn(script: Script) -> bool:
    """Whether a script can only start its ranks itself, because it never reads those it gets."""
    read = {node.value for node in script.nodes if isinstance(node, ast.Constant)}
    return bool(script.calls_of(*SPAWN)) and read.isdisjoint(RANK)


def find_mistakes(script: Script) -> Iterator[Remark]:
    """What works on one machine only, or trains differently on several ranks."""
    spawns = bool(script.calls_of(*SPAWN))
    texts = [node for node in script.nodes if isinstance(node, ast.Constant)]
    values = {str(node.value): node.lineno for node in texts}
    for node in script.nodes if not spawns else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and script.dotted(target.value) == "os.environ":
            name = getattr(target.slice, "value", "")
            constant = isinstance(getattr(node, "value", None), ast.Constant)
            if constant and name in ("MASTER_ADDR", "MASTER_PORT", *RANK):
                text = f"this overwrites {name}, which Paceline sets as torchrun does: use "
                yield Remark(
                    target.lineno, f'{text}os.environ.setdefault("{name}", ...)', must=True
                )
    for text, line in values.items():
        if _FIXED.match(text):
            what = "a fixed address: nodes cannot find each other, and two runs on one node collide"
            yield Remark(line, f'{what}. Use "env://"')
