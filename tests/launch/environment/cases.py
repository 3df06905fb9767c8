"""The golden build scripts and definitions. `python -m tests.launch.environment.cases` rewrites them."""

from __future__ import annotations

from pathlib import Path

from paceline.launch.environment.activation import module_section
from paceline.launch.environment.build_script import (
    BuildFolder,
    BuildResources,
    build_directives,
    definition,
    image_steps,
    render_build,
    venv_steps,
)
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag

HERE = Path(__file__).parent / "golden"
FOLDER = BuildFolder(Path("/scratch/ann/vision/.environments/0123456789abcdef.build-9f8e7d6c"))
TARGET = Path("/scratch/ann/vision/.environments/0123456789abcdef")
BASE = "docker://pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime"


def job(**keys: object) -> Job:
    flags = [Flag(f"--{key}", key.replace("__", "."), value) for key, value in keys.items()]
    return load_job(Program("env"), flags=flags, cwd=Path("/home/ann/my vision"))


def script(job: Job, steps: list[str], size: BuildResources | None = None) -> str:
    return render_build(
        title="venv 0123456789abcdef of vision: requirements.txt",
        folder=FOLDER,
        link=TARGET,
        cwd=job.folder,
        directives=build_directives(job, FOLDER, size or BuildResources()),
        modules=module_section(job.environment).lines(),
        setup=job.environment.setup,
        steps=steps,
    )


def texts() -> dict[str, str]:
    """Name -> text."""
    plain = venv_steps(python="/usr/bin/python3", version="3.11")
    full = venv_steps(
        python="python3", version="3.12", system_packages=True, first=True, horovod=True
    )
    modules = job(
        environment__modules=["python/3.12", "openmpi"],
        environment__setup=["export CC=gcc"],
        job__partition="gpu",
        job__account="physics",
        job__gpu_type="a100",
        job__time="30m",
    )
    lines = ["torch==2.6.0", "timm>=1.0"]
    return {
        "venv.sbatch": script(job(), plain),
        "venv-everything.sbatch": script(
            modules, full, BuildResources(cpus=8, gpus=1, memory=16384, time=1800)
        ),
        "image.sbatch": script(job(), image_steps(engine="apptainer", base=BASE, installs=True)),
        "pull.sbatch": script(job(), image_steps(engine="singularity", base=BASE, installs=False)),
        "image.def": definition(
            base=BASE, origin="requirements.txt", lines=lines, constraints=["numpy<3"]
        ),
        "local-image.def": definition(
            base="/shared/torch.sif", origin="pyproject.toml", lines=lines
        ),
    }


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for old in HERE.iterdir():
        old.unlink()
    for name, text in texts().items():
        (HERE / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(texts())} files to {HERE}")
