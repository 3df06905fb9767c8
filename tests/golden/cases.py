"""The golden scripts: every style x environment. `python -m tests.golden.cases` rewrites them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.slurm_job import SlurmPlan, plan_slurm
from paceline.slurm.sbatch import Trials
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.spec.run_path import RunPath

HERE = Path(__file__).parent
RUN_PATH = RunPath(Path("/scratch/ann"), "vision", "base", "20260102-030405-abcd")
ENVIRON = {"HOME": "/home/ann", "USER": "ann", "PATH": "/usr/bin:/bin", "WANDB_API_KEY": "hush"}

STYLES: dict[str, dict[str, Any]] = {
    "fork": {"launch.style": "fork"},
    "srun": {"launch.style": "srun"},
    "torchrun": {"launch.style": "torchrun"},
    "spawn": {"launch.style": "spawn"},
    "mpirun": {"launch.style": "mpirun"},
    "mpirun-torchrun": {"launch.style": "mpirun", "launch.mpirun_over": "torchrun"},
    "lightning": {"launch.style": "lightning"},
    "accelerate": {"launch.style": "accelerate"},
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "current": {"environment.kind": "current"},
    "venv": {"environment.kind": "venv", "environment.path": "/home/ann/my envs/torch"},
    "conda": {"environment.kind": "conda", "environment.path": "/opt/conda/envs/torch"},
    "modules": {"environment.modules": ["cuda/12.4", "python/3.11"]},
    "apptainer": {
        "environment.kind": "container",
        "environment.image": "/shared/torch.sif",
        "environment.binds": ["/data:/data:ro"],
    },
    "pyxis": {
        "environment.kind": "container",
        "environment.engine": "pyxis",
        "environment.image": "nvcr.io#nvidia/pytorch:25.01-py3",
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "srun-one-gpu-each": {
        "launch.style": "srun",
        "launch.gpu_binding": "one",
        "job.gpu_type": "a100",
    },
    "modules-kept": {
        "environment.kind": "venv",
        "environment.path": "/home/ann/torch",
        "environment.modules": ["cuda/12.4"],
        "environment.module_paths": ["/shared/module files"],
        "environment.purge": False,
        "environment.setup": ["export OMP_PROC_BIND=close"],
        "environment.proxies": True,
        "launch.style": "mpirun",
    },
    "container-fetched": {
        "environment.kind": "container",
        "environment.engine": "singularity",
        "environment.image": "docker://pytorch/pytorch:2.9.1",
        "environment.binds": ["/data sets", "/models:/m:ro"],
        "environment.engine_options": ["--writable-tmpfs"],
        "data.folder": "/local/$USER/it's mine",
        "data.stage": ["images", "/shared/labels"],
    },
    "one-node": {"job.nodes": 1},
    "cpu": {"job.gpus_per_node": 0, "launch.nproc": 4, "runtime.cpu": True},
    "no-requeue": {"resume.requeue": False},
    "chosen-nodes": {"job.nodelist": "gpu[1-2]"},
    "everything": {
        "job.name": 'a "name" with \\ and # in it',
        "job.comment": "änderung; $(rm -rf /) `x`",
        "job.account": "physics",
        "job.qos": "long",
        "job.constraint": "a100&nvlink",
        "job.exclude": "gpu[7-9]",
        "job.reservation": "class",
        "job.exclusive": True,
        "job.mail": "ann@example.org",
        "job.time": "1d12h",
        "job.mem_per_gpu": "32G",
        "job.cpus_per_gpu": 12,
        "job.partition": "gpu,long",
        "job.extra": ["--switches=1", "--gres-flags", "enforce-binding", "--no-kill"],
        "environment.setup": ["ulimit -n 65536"],
        "environment.secrets": ["WANDB_API_KEY"],
        "environment.variables": {"GREETING": 'it\'s a, "b"\nand $c'},
    },
}
SWEEPS: dict[str, dict[str, Any]] = {
    "sweep": {"sweep.pack": 1},
    "sweep-cpu": {"sweep.pack": 1, "job.nodes": 1, "job.gpus_per_node": 0},
    "sweep-pack": {
        "sweep.pack": 4,
        "job.nodes": 1,
        "job.gpus_per_node": 1,
        "job.mem_per_node": "8G",
    },
    "sweep-mpirun": {"sweep.pack": 1, "launch.style": "mpirun"},
    "sweep-apptainer": {"sweep.pack": 1, **ENVIRONMENTS["apptainer"]},
    "sweep-pyxis": {"sweep.pack": 1, **ENVIRONMENTS["pyxis"]},
    "sweep-no-requeue": {"sweep.pack": 1, "resume.requeue": False},
    "sweep-chosen-nodes": {"sweep.pack": 1, "job.nodelist": "gpu[1-2]"},
    "sweep-exclude": {"sweep.pack": 1, "job.exclude": "gpu[7-9]"},
}

BASE: dict[str, Any] = {
    "job.nodes": 2,
    "job.gpus_per_node": 4,
    "job.cpus_per_gpu": 8,
    "job.time": "2h",
}


def cases() -> dict[str, dict[str, Any]]:
    """Return the settings by name. All styles in the current environment, all environments under the default style."""
    found = dict(STYLES)
    for name, keys in ENVIRONMENTS.items():
        for style in ("fork", "srun", "mpirun"):
            if name != "current" and (name, style) != ("pyxis", "mpirun"):
                found[f"{style}-{name}"] = {**STYLES[style], **keys}
    return {**found, **OTHERS, **SWEEPS}


def plan(keys: dict[str, Any], **more: Any) -> SlurmPlan:
    """The plan for `train.py --lr 0.1`, in a folder where no paceline.toml is near."""
    requested = {
        key: value for key, value in {**BASE, **keys}.items() if not key.startswith("sweep.")
    }
    if "sweep.pack" in keys:
        sweep = replace(RUN_PATH, run_id="digits").folder.path
        run_path = replace(RUN_PATH, experiment="base/digits/submissions", run_id="1")
        more = {"run_path": run_path, "trials": Trials(sweep, keys["sweep.pack"]), **more}
    flags = [Flag(f"--{key}", key, value) for key, value in requested.items()]
    job = load_job(Program("train.py", ("--lr", "0.1")), flags=flags, cwd=Path("/home/ann/vision"))
    return plan_slurm(
        job, **{"run_path": RUN_PATH, "environ": ENVIRON, "python": "/usr/bin/python3", **more}
    )


if __name__ == "__main__":
    for old in HERE.glob("*.sbatch"):
        old.unlink()
    for name, keys in cases().items():
        (HERE / f"{name}.sbatch").write_text(plan(keys).script, encoding="utf-8")
    print(f"wrote {len(cases())} scripts to {HERE}")
