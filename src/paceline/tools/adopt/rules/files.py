"""Files that a script writes: which calls write one, and whether one rank may write it alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator

from paceline.tools.adopt.ranks import Ranks
from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import is_backward
from paceline.tools.adopt.value_origins import Origins

SAVE = "all ranks would write the same file at the same time"
PATH_SECOND = (  # (object, file)
    "torch.save",
    "torch.jit.save",
    "torch.export.save",
    "json.dump",
    "pickle.dump",
    "dill.dump",
    "joblib.dump",
    "yaml.dump",
    "yaml.safe_dump",
    "toml.dump",
    "safetensors.torch.save_file",
    "safetensors.torch.save_model",
    "torchvision.utils.save_image",
    "shutil.copy",
    "shutil.copy2",
    "shutil.copyfile",
    "shutil.move",
    "os.rename",
    "os.replace",
    "os.symlink",
)
PATH_FIRST = (
    "numpy.save",
    "numpy.savez",
    "numpy.savez_compressed",
    "numpy.savetxt",
    "matplotlib.pyplot.savefig",
    "matplotlib.pyplot.imsave",
    "cv2.imwrite",
    "imageio.imwrite",
    "imageio.v2.imwrite",
    "imageio.v3.imwrite",
    "torchaudio.save",
    "scipy.io.savemat",
    "os.remove",
    "os.unlink",
    "logging.FileHandler",
)
FILE_KEYWORDS = ("f", "fp", "stream", "file", "filename", "dst")
OPENING = (
    "open",
    "io.open",
    "gzip.open",
    "bz2.open",
    "lzma.open",
    "codecs.open",
    "zipfile.ZipFile",
    "h5py.File",
)
# a mess if all ranks write it, but no harm to the training
LOGS = ("open", "FileHandler", "basicConfig")
METHODS = (
    "save_pretrained",
    "savefig",
    "write_text",
    "write_bytes",
    "to_csv",
    "to_json",
    "to_pickle",
    "to_parquet",
    "to_feather",
    "to_excel",
    "to_hdf",
)
MODE = re.compile(r"[rbt]*[wax+][wax+bt]*$")

# What may be called in a statement that one rank runs alone: nothing that ranks do together, or
# that changes objects.
HARMLESS = re.compile(
    r"(?:str|int|float|repr|len|list|dict|tuple|set|sorted|range|zip|enumerate|sum|min|max|round|abs|bool|vars|getattr|"
    r"isinstance|format|open|state_dict|item|cpu|detach|clone|numpy|tolist|join|write|writelines|writerow|writerows|"
    r"writeheader|dump|dumps|items|keys|values|get|copy|mean|std|as_posix|resolve|with_suffix|with_name|strip|encode|"
    r"replace|isoformat|strftime|now|today|flush|close|savefig|save_pretrained|write_text|write_bytes|to_csv|to_json|"
    r"to_pickle|to_parquet|to_dict|asdict|deepcopy|Path|getcwd|basename|dirname|expanduser|abspath|get_rng_state|"
    r"writer|DictWriter|DataFrame|time|perf_counter|stack|cat|tensor|save\w*|imsave|imwrite|File|ZipFile)$"
)


def path_key(script: Script, path: ast.expr) -> tuple[object, str]:
    """Return the text of a path, and the function whose names are in it, if any."""
    named = any(isinstance(node, ast.Name) for node in ast.walk(path))
    return script.function_of(path) if named else None, script.source.text_of(path)


class Files:
    """The calls of a script that write a file."""

    def __init__(self, script: Script, origins: Origins, ranks: Ranks) -> None:
        self.script, self.origins, self.ranks = script, origins, ranks
        packages = set(script.imports.values())
        self.is_sharded = any(
            "fsdp" in each or "deepspeed" in each or "fully_shard" in each for each in packages
        )

    def change(
        self, condition: Callable[[ast.Call], str | None]
    ) -> Iterator[tuple[ast.AST, Edit | Remark]]:
        """Put each statement that writes a file under a condition that is true on one rank.

        `condition` returns that for a call, or None where it is not certain that the script can ask
        for its rank.
        """
        done: set[ast.stmt] = set()
        for call in self.script.calls:
            target = self._target(call)
            if target is None or self._is_own(target) or self.ranks.is_guarded(call):
                continue
            statement = self._whole(self.script.statement(call))
            if any(each in done for each in (statement, *self.script.ancestors(statement))):
                continue
            done.add(statement)
            test = condition(call)
            if test is not None and self._may_move(statement, call):
                for change in self.script.source.under(statement, f"if {test}:", SAVE):
                    yield call, change
            else:
                when = f"if {test}" if test else "on rank 0"
                text = (
                    f"all ranks write this file: write it only {when}, and keep whatever the "
                    "other ranks need outside"
                )
                yield call, Remark(call.lineno, text, must=self._last_name(call) not in LOGS)

    def paths(self, calls: Iterable[ast.AST]) -> set[tuple[object, str]]:
        """Return how the script names the files that calls write, and where names mean this."""
        targets = [self._target(call) for call in calls if isinstance(call, ast.Call)]
        return {path_key(self.script, each) for each in targets if each is not None}

    # -- what is written
    # -------------------------------------------------------------------------------

    def _target(self, call: ast.Call) -> ast.expr | None:
        """Return the file that a call writes; None if it writes none."""
        name = self.script.dotted(call.func) or getattr(call.func, "id", "")
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        keywords = {each.arg: each.value for each in call.keywords}
        if name in OPENING or (method == "open" and not self.script.dotted(call.func)):
            # Path(...).open("w")
            own = isinstance(call.func, ast.Attribute) and name not in OPENING
            modes = [
                *call.args[0 if own else 1 :][:1],
                *([keywords["mode"]] if "mode" in keywords else []),
            ]
            writes = any(
                isinstance(each, ast.Constant) and MODE.match(str(each.value)) for each in modes
            )
            where = (
                call.func.value
                if own and isinstance(call.func, ast.Attribute)
                else (*call.args, call)[0]
            )
            return where if writes else None
        if name == "logging.basicConfig":
            return keywords.get("filename")
        if name in PATH_SECOND:
            named = [keywords[each] for each in FILE_KEYWORDS if each in keywords]
            return next(iter([*call.args[1:2], *named]), None)
        if name in PATH_FIRST:
            return (*call.args, *keywords.values(), call)[0]
        if method in METHODS and not (name and not name.startswith("matplotlib")):
            if method.startswith("to_") and not call.args and "path_or_buf" not in keywords:
                return None  # returns a text
            assert isinstance(call.func, ast.Attribute)
            return (
                call.func.value
                if method.startswith("write_")
                else (*call.args, *keywords.values(), call)[0]
            )
        is_path = (
            bool(call.args) and isinstance(call.args[0], (ast.JoinedStr, ast.Constant)) and not name
        )
        if (
            method == "save"
            and is_path
            and "save" not in self.script.methods
            and isinstance(getattr(call.args[0], "value", ""), str)
        ):
            return call.args[0]  # of an image
        return None

    def _is_own(self, target: ast.expr) -> bool:
        """Whether each rank writes a file of its own, by its name, or none at all, but to
        memory.
        """
        if self.ranks.depends(target):
            return True
        values = [
            target,
            *(self.origins.values(target.id, target) if isinstance(target, ast.Name) else []),
        ]
        values += self.origins.of(target)
        for node in (part for value in values for part in ast.walk(value)):
            if isinstance(node, ast.Call):
                name = self.script.dotted(node.func)
                if (
                    name.startswith(("tempfile.", "uuid.", "io.BytesIO", "io.StringIO"))
                    or name == "os.getpid"
                ):
                    return True
                if self._target(node) is not None:
                    return True  # an open file: opening it is what counts
        return False

    # -- what one rank may do alone
    # --------------------------------------------------------------------

    def _whole(self, statement: ast.stmt) -> ast.stmt:
        """Return the `with open(...)` around a statement that writes to that file, or the
        statement itself.
        """
        parent = self.script.parents.get(statement)
        opens = isinstance(parent, ast.With) and any(
            isinstance(item.context_expr, ast.Call) and self._target(item.context_expr) is not None
            for item in parent.items
        )
        return self._whole(parent) if opens and isinstance(parent, ast.With) else statement

    def _may_move(self, statement: ast.stmt, call: ast.Call) -> bool:
        """Whether nothing that a statement does is needed on other ranks, and nothing in it is
        done by all together.
        """
        if isinstance(statement, ast.Expr):
            if statement.value is not call and not self._is_whole_write(statement.value, call):
                return False
        elif not isinstance(statement, ast.With):
            return False
        bound = set()
        for node in ast.walk(statement):
            leaves = (
                ast.Return,
                ast.Break,
                ast.Continue,
                ast.Raise,
                ast.Yield,
                ast.YieldFrom,
                ast.Await,
                ast.Global,
            )
            if (
                isinstance(node, leaves)
                or is_backward(node)
                or isinstance(node, (ast.FunctionDef, ast.ClassDef))
            ):
                return False
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
                node.ctx, ast.Load
            ):
                return False
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            if isinstance(node, ast.Call) and not self._is_harmless(node):
                return False
        return not self._is_used_outside(statement, bound)

    def _is_whole_write(self, value: ast.expr, call: ast.Call) -> bool:
        """Whether a statement only writes to what it opens: `open(path, "w").write(x)`, `dump(x,
        open(path, "w"))`.
        """
        if not isinstance(value, ast.Call):
            return False
        return self._target(value) is call or (
            isinstance(value.func, ast.Attribute) and value.func.value is call
        )

    @staticmethod
    def _last_name(call: ast.Call) -> str:
        return (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )

    def _is_harmless(self, call: ast.Call) -> bool:
        name, last = self.script.dotted(call.func), self._last_name(call)
        if isinstance(call.func, ast.Name) and not name and call.func.id in self.script.functions:
            return False
        if "distributed" in name or (last == "state_dict" and self.is_sharded):
            return False
        return HARMLESS.match(last) is not None

    def _is_used_outside(self, statement: ast.stmt, names: set[str]) -> bool:
        """Whether a name that a statement sets is read elsewhere in the function."""
        function = self.script.function_of(statement)
        inside = set(ast.walk(statement))
        return any(
            isinstance(node, ast.Name)
            and node.id in names
            and isinstance(node.ctx, ast.Load)
            and node not in inside
            for node in ast.walk(function or self.script.tree)
        )
