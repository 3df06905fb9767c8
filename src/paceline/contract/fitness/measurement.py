"""What one rank measures in a few seconds: the speed of its device and of the links to other
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# begins the line that a rank prints instead, if the variable `env.FITNESS` is not set
LINE = "paceline-fitness "


@dataclass(frozen=True)
class Measurement:
    """One rank's numbers; 0 where it has none. Speeds of links are in GB/s, of all-reduces as bus
    bandwidth.
    """

    rank: int
    host: str
    node: int
    device: str  # "cpu", or the GPU's name
    tflops: float = 0.0  # of a matrix product; on a CPU per second of its own CPU time
    within: float = 0.0  # all-reduce among the ranks of the node
    between: float = 0.0  # all-reduce among the first ranks of all nodes
    # exchange with the first rank of another node, by its number
    pairs: dict[str, float] = field(default_factory=dict)
    interface: str = ""  # over which nodes are connected
    interface_speed: float = 0.0  # GB/s, as its driver reports it
    fabric: str = ""  # such as "400 Gb/sec (4X NDR)"
    fabric_speed: float = 0.0  # GB/s of all InfiniBand ports
    backend: str = ""
    complete: bool = False  # all of it was measured
    error: str = ""  # why the rest was not
