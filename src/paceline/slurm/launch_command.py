"""The line of a batch script that launches the agents, with srun or mpirun."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.quote import quote
from paceline.slurm.script_plan import ScriptPlan


def launch_lines(plan: ScriptPlan, folder: str, rendezvous: str = "") -> list[str]:
    """Return what starts the agents. `folder` has the run half; `rendezvous` varies the port from
    trial to trial.
    """
    command = _mpirun(plan) if plan.mpirun else _srun(plan)
    entry = [" ".join(plan.container.prefix)] if plan.container.prefix else []
    agents = (
        "One agent per rank."
        if plan.task_counts.tasks_per_node > 1
        else "One agent per node starts the ranks."
    )
    return [
        f"# {agents}",
        *([f"paceline_open_rendezvous{rendezvous}"] if plan.task_counts.tasks > 1 else []),
        *([f"paceline_forward_variables {' '.join(plan.forwarded)}"] if plan.mpirun else []),
        *_folded(
            [
                "paceline_launch " + command[0],
                *command[1:],
                *entry,
                f'"$paceline_python" "{folder}/paceline.zip"',
            ]
        ),
    ]


def _srun(plan: ScriptPlan) -> list[str]:
    """Repeat every number: newer steps no longer inherit some of them, nor the job's `--export`."""
    counts = plan.task_counts
    return [
        "srun --export=ALL --kill-on-bad-exit=1 --mpi=none --unbuffered",
        f"--nodes={counts.nodes} --ntasks={counts.tasks} --ntasks-per-node={counts.tasks_per_node} "
        f"--cpus-per-task={counts.cpus_per_task}",
        *(quote(option) for option in plan.step_options),
        *plan.step_shell,
        *plan.container.srun_options,
    ]


def _mpirun(plan: ScriptPlan) -> list[str]:
    counts = plan.task_counts
    return [
        f"mpirun -np {counts.tasks} --map-by ppr:{counts.tasks_per_node}:node --oversubscribe "
        "--bind-to none",
        '"${paceline_forward[@]}"',
    ]


def _folded(parts: Sequence[str]) -> list[str]:
    """Spread one command over several lines."""
    lines = [parts[0], *(f"    {part}" for part in parts[1:])]
    return [f"{line} \\" for line in lines[:-1]] + [lines[-1]]
