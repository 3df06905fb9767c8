"""The lines of a build that create a venv and fill it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.quote import quote

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
    """Return the lines. `version` is that of the Python here: a node with another one has a different Python."""
    constrained = ' --constraint "$build/constraints.txt"' if constraints else ""
    lines = [
        f"python={quote(python)}",
        """found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||""",
        '    paceline_fail "Cannot run $python on $HOSTNAME."',
        f'[ "$found" = {version} ] ||',
        f'    paceline_fail "$python is $found on $HOSTNAME, but {version} where you submitted."',
        'say "creating a venv with $python ($found) on $HOSTNAME"',
        f'"$python" -m venv{" --system-site-packages" if system_packages else ""} "$target" ||',
        '    paceline_fail "$python cannot create a venv. On Debian, install python3-venv."',
        "# Keep what pip downloads next to the environments: a home folder is small.",
        'export PIP_CACHE_DIR="${PIP_CACHE_DIR:-${target%/*}/cache/pip}"',
        'pip=("$target/bin/python" -m pip --disable-pip-version-check --no-input)',
        f"install=(install --progress-bar=off{constrained})",
    ]
    if first:
        lines += [
            "# torch first: packages that are compiled against it, or depend on any version, then find the right one.",
            '"${pip[@]}" "${install[@]}" --requirement "$build/first.txt" ||',
            '    paceline_fail "pip could not install torch."',
        ]
    lines += [
        '"${pip[@]}" "${install[@]}" --requirement "$build/requirements.txt" ||',
        '    paceline_fail "pip could not install the requirements."',
    ]
    if horovod:
        lines += _horovod()
    return [
        *lines,
        '"${pip[@]}" check || say "note: pip reports conflicts between some packages (above)"',
        '"${pip[@]}" freeze >"$target/packages.txt" || paceline_fail "pip cannot list what it installed."',
    ]


def _horovod() -> Sequence[str]:
    """Return the lines that compile Horovod. Its source asks for an older C++ than torch's headers need."""
    return f"""\
# Compile Horovod against the torch that was just installed and the MPI of this node.
"$target/bin/python" -c 'import torch' || paceline_fail "Horovod needs torch. Add it to the requirements."
command -v mpicxx >/dev/null ||
    paceline_fail "Horovod needs mpicxx, which is not on $HOSTNAME. Load a module that has it."
"${{pip[@]}}" "${{install[@]}}" 'setuptools<81' wheel packaging cloudpickle psutil pyyaml 'cmake<4' ||
    paceline_fail "pip could not install the build dependencies of Horovod."
mkdir -p "$build/tmp"
"${{pip[@]}}" download --progress-bar=off --no-deps --no-binary horovod \\
    --no-build-isolation --dest "$build/tmp" horovod=={HOROVOD} ||
    paceline_fail "pip could not download the source of Horovod."
tar -xf "$build/tmp/horovod-{HOROVOD}.tar.gz" -C "$build/tmp" || paceline_fail "Cannot unpack the source of Horovod."
sed -i 's/CMAKE_CXX_STANDARD 1[14])/CMAKE_CXX_STANDARD 17)/' "$build/tmp/horovod-{HOROVOD}/CMakeLists.txt" \\
    "$build/tmp/horovod-{HOROVOD}/horovod/torch/CMakeLists.txt" || paceline_fail "Cannot prepare the source of Horovod."
# For GPUs, if torch is built for CUDA and nvcc is here; a variable that is set wins.
if [ -z "${{HOROVOD_GPU_OPERATIONS:-}}" ] && command -v nvcc >/dev/null &&
    "$target/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    export HOROVOD_GPU_OPERATIONS=NCCL
fi
say "compiling Horovod {HOROVOD}, which takes a few minutes"
PATH="$target/bin:$PATH" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \\
    HOROVOD_WITH_MPI="${{HOROVOD_WITH_MPI:-1}}" HOROVOD_WITHOUT_GLOO="${{HOROVOD_WITHOUT_GLOO:-1}}" \\
    "${{pip[@]}}" "${{install[@]}}" --no-build-isolation "$build/tmp/horovod-{HOROVOD}" ||
    paceline_fail "Could not compile Horovod (see above)."
"$target/bin/python" -c 'import horovod.torch' ||
    paceline_fail "Horovod was compiled but cannot be imported.\"""".splitlines()
