"""Variables that take effect only when a process starts or torch is imported: a zygote must have
them from its start.

Keep this module light: `paceline run` reads it before it has imported anything.
"""

from __future__ import annotations

from paceline.contract import gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Libraries read these when they load. What torch itself reads is in torch/*/config.py and in its
# C++ code.
READ_AT_IMPORT = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "VECLIB_",
    "NVPL_",
    "NUMEXPR_",
    "ATEN_",
    "TORCH",
    "PYTORCH_",
    "AOT",
    "INDUCTOR_",
    "TRITON_",
    "PT2_",
    "FX_",
    "CUTLASS_",
    "CUTEDSL_",
    "KINETO_",
    "PARTITIONER_",
    "COMPILE_STROBELIGHT_",
    "CUDA_",
    "HIP_",
    "ROCM_",
    "DNNL_",
    "ONEDNN_",
    "NPY_",
    "NUMPY_",
    "SYMPY_",
    "MPMATH_",
    "CXX",
    "LD_",
    "MALLOC_",
)

# The interpreter and the C library read these when a process starts. A script that sets one changes
# nothing itself.
READ_AT_START = ("PYTHON", "GLIBC_", "LC_", "LANG", "HOME")

# When a rank first uses a GPU, compiles something, or opens a process group.
READ_LATER = (
    *gpus.NAMES,
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TORCH_NCCL_",
)

READ_BY_RANKS = ("PACELINE_", "WANDB_", "NCCL_", "GLOO_")


def is_read_at_import(name: str) -> bool:
    """Whether a script that sets this variable before it imports torch cannot be forked after that
    import.
    """
    return name.startswith(READ_AT_IMPORT) and (
        name in gpus.NAMES or not name.startswith(READ_LATER)
    )


def early_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be the same in a zygote and in the ranks that it forks."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(READ_AT_IMPORT + READ_AT_START) and not name.startswith(READ_LATER)
    }


def import_variables(variables: Mapping[str, str], *, only_known: bool) -> dict[str, str]:
    """Return those of a run's own variables that a zygote needs: imports may read any name.

    `only_known`: it imports nothing but torch and Paceline.
    """
    if only_known:
        return early_variables(variables)
    others = READ_LATER + READ_BY_RANKS
    return {name: text for name, text in variables.items() if not name.startswith(others)}
