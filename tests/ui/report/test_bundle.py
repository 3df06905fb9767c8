"""Modules become one script that does the same."""

from __future__ import annotations

from pathlib import Path

from paceline.ui.report import STATIC, bundle_modules


def write(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def test_modules_keep_their_own_names(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        a='import { twice } from "./b.js";\nimport { name } from "./c.js";\nconst secret = 1;\nout(twice(secret));\n',
        b='import { name } from "./c.js";\nconst secret = 2;\nexport function twice(x) { return x * secret + name; }\n',
        c="export const name = 5;\n",
    )
    bundled = bundle_modules(folder, "a")
    assert bundled.count("const name = 5;") == 1  # imported twice, contained once
    assert bundled.index("$c =") < bundled.index("$b =") < bundled.index("$a =")
    assert "const { twice } = $b;" in bundled
    assert "return { twice };" in bundled


def test_every_module_is_part_of_the_page() -> None:
    bundled = bundle_modules(STATIC)
    assert {path.stem for path in STATIC.glob("*.js")} == {
        name
        for name in (path.stem for path in STATIC.glob("*.js"))
        if f"const ${name} = " in bundled
    }


def test_no_module_makes_markup_of_text() -> None:
    """Names and log lines may contain markup; the pages only ever set text."""
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert way not in text, f"{path.name}: {way}"
    page = (STATIC / "index.html").read_text()
    assert " on" not in page.replace("content", "").lower().split("<body>")[1]
