"""The lines of a build that make a venv and fill it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.quote import quote

HOROVOD = "0.28.1"


def venv_steps(
    *,
    python: str,
    version: str,
    system_packages: bool = False,
    first: bool = False,
    constraints: bool = False,
    horovod: bool = False,
) -> list[str]:
    """`version` is what that Python answered here: a node's that answers otherwise is not the one that was meant."""
    held = ' --constraint "$build/constraints.txt"' if constraints else ""
    lines = [
        f"python={quote(python)}",
        """found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||""",
        '    fail "cannot run $python on $HOSTNAME"',
        f'[ "$found" = {version} ] || fail "$python is $found on $HOSTNAME, and was {version} where this was asked"',
        'say "making a venv with $python ($found) on $HOSTNAME"',
        f'"$python" -m venv{" --system-site-packages" if system_packages else ""} "$target" ||',
        '    fail "$python cannot make a venv (Debian keeps that in python3-venv)"',
        "# What pip fetches is kept beside the environments: a home folder is small.",
        'export PIP_CACHE_DIR="${PIP_CACHE_DIR:-${target%/*}/cache/pip}"',
        'pip=("$target/bin/python" -m pip --disable-pip-version-check --no-input)',
        f"install=(install --progress-bar=off{held})",
    ]
    if first:
        lines += [
            "# torch first: what is compiled against it, or depends on any of it, then finds what was asked for.",
            '"${pip[@]}" "${install[@]}" --requirement "$build/first.txt" || fail "pip could not install torch"',
        ]
    lines += [
        '"${pip[@]}" "${install[@]}" --requirement "$build/requirements.txt" ||',
        '    fail "pip could not install the requirements"',
    ]
    if horovod:
        lines += _horovod()
    return [
        *lines,
        '"${pip[@]}" check || say "note: pip finds that some of these do not fit each other (above)"',
        '"${pip[@]}" freeze >"$target/packages.txt" || fail "pip cannot list what it installed"',
    ]


def _horovod() -> Sequence[str]:
    """Horovod ships as source, which asks for an older C++ than torch's headers need."""
    return f"""\
# Horovod is compiled against the torch that was just installed, and the MPI that is found here.
"$target/bin/python" -c 'import torch' || fail "Horovod needs torch: add it to the requirements"
command -v mpicxx >/dev/null || fail "Horovod needs MPI's compiler: there is no mpicxx on $HOSTNAME (a module?)"
"${{pip[@]}}" "${{install[@]}}" 'setuptools<81' wheel packaging cloudpickle psutil pyyaml 'cmake<4' ||
    fail "pip could not install what Horovod is built with"
mkdir -p "$build/tmp"
"${{pip[@]}}" download --progress-bar=off --no-deps --no-binary horovod \\
    --no-build-isolation --dest "$build/tmp" horovod=={HOROVOD} || fail "pip could not fetch Horovod's source"
tar -xf "$build/tmp/horovod-{HOROVOD}.tar.gz" -C "$build/tmp" || fail "cannot unpack Horovod's source"
sed -i 's/CMAKE_CXX_STANDARD 1[14])/CMAKE_CXX_STANDARD 17)/' "$build/tmp/horovod-{HOROVOD}/CMakeLists.txt" \\
    "$build/tmp/horovod-{HOROVOD}/horovod/torch/CMakeLists.txt" || fail "cannot prepare Horovod's source"
# On GPUs where this torch knows CUDA and its compiler is here; what is set already stays.
if [ -z "${{HOROVOD_GPU_OPERATIONS:-}}" ] && command -v nvcc >/dev/null &&
    "$target/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    export HOROVOD_GPU_OPERATIONS=NCCL
fi
say "compiling Horovod {HOROVOD}: this takes some minutes"
PATH="$target/bin:$PATH" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \\
    HOROVOD_WITH_MPI="${{HOROVOD_WITH_MPI:-1}}" HOROVOD_WITHOUT_GLOO="${{HOROVOD_WITHOUT_GLOO:-1}}" \\
    "${{pip[@]}}" "${{install[@]}}" --no-build-isolation "$build/tmp/horovod-{HOROVOD}" ||
    fail "Horovod could not be built (above)"
"$target/bin/python" -c 'import horovod.torch' || fail "Horovod was built, and cannot be imported\"""".splitlines()
