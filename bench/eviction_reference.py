"""What eviction is held against: figures of an independent simulator, and goals. All of a trace's second half.

The simulator was written in C before any code here, for the same workloads, and was checked against libCacheSim.
"""

from __future__ import annotations

from dataclasses import dataclass

Both = tuple[float, float]  # block hit rate, prefill compute saved

WITHIN = 0.003  # so near do lru, arc, s3fifo and belady come to the simulator's figures
NEVER_BELOW = 0.003  # so many hits at most may rvi with its guard be under lru

CAPACITIES = {
    "conv": (1000, 1953, 5859, 10000, 20000, 50000),
    "synth": (1000, 1953, 5859, 10000, 20000),
    "cc": (1000, 2000, 5000, 10000, 20000),
    "mix": (2000, 5000, 10000, 20000, 40000),
    "agents": (100, 200, 400, 800),
}

SIMULATED: dict[str, dict[str, tuple[Both, ...]]] = {  # by workload and policy, at CAPACITIES
    "conv": {
        "lru": (
            (0.046, 0.032),
            (0.054, 0.039),
            (0.134, 0.113),
            (0.215, 0.195),
            (0.297, 0.273),
            (0.369, 0.349),
        ),
        "arc": (
            (0.054, 0.042),
            (0.072, 0.057),
            (0.144, 0.122),
            (0.234, 0.213),
            (0.306, 0.286),
            (0.346, 0.324),
        ),
        "s3fifo": (
            *((0.056, 0.043), (0.075, 0.061), (0.163, 0.148)),
            *((0.202, 0.186), (0.232, 0.215), (0.346, 0.324)),
        ),
        "belady": (
            *((0.193, 0.169), (0.258, 0.235), (0.368, 0.348)),
            *((0.390, 0.372), (0.390, 0.372), (0.390, 0.372)),
        ),
    },
    "synth": {
        "lru": ((0.128, 0.123), (0.213, 0.209), (0.447, 0.451), (0.596, 0.620), (0.765, 0.779)),
        "arc": ((0.143, 0.135), (0.217, 0.217), (0.462, 0.480), (0.604, 0.628), (0.795, 0.807)),
        "s3fifo": ((0.136, 0.127), (0.212, 0.202), (0.443, 0.467), (0.585, 0.599), (0.796, 0.808)),
        "belady": ((0.359, 0.346), (0.485, 0.499), (0.711, 0.727), (0.816, 0.827), (0.852, 0.861)),
    },
    "cc": {
        "lru": ((0.130, 0.081), (0.401, 0.306), (0.820, 0.761), (0.931, 0.913), (0.955, 0.944)),
        "arc": ((0.247, 0.162), (0.450, 0.345), (0.803, 0.739), (0.917, 0.886), (0.950, 0.933)),
        "s3fifo": ((0.277, 0.173), (0.462, 0.341), (0.774, 0.675), (0.910, 0.867), (0.951, 0.934)),
        "belady": ((0.466, 0.340), (0.685, 0.579), (0.900, 0.864), (0.954, 0.942), (0.963, 0.952)),
    },
    "mix": {
        "lru": ((0.032, 0.010), (0.054, 0.017), (0.102, 0.042), (0.399, 0.297), (0.761, 0.722)),
        "arc": ((0.098, 0.032), (0.145, 0.060), (0.334, 0.227), (0.515, 0.443), (0.741, 0.704)),
        "s3fifo": ((0.097, 0.031), (0.135, 0.053), (0.319, 0.206), (0.489, 0.400), (0.734, 0.670)),
        "belady": ((0.196, 0.102), (0.348, 0.232), (0.527, 0.428), (0.739, 0.686), (0.878, 0.871)),
    },
    "agents": {
        "lru": ((0.563, 0.494), (0.805, 0.755), (0.908, 0.906), (0.911, 0.908)),
        "arc": ((0.520, 0.451), (0.787, 0.732), (0.904, 0.900), (0.908, 0.905)),
        "s3fifo": ((0.513, 0.445), (0.750, 0.698), (0.893, 0.892), (0.909, 0.907)),
        "belady": ((0.630, 0.554), (0.817, 0.767), (0.910, 0.908), (0.912, 0.909)),
    },
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What rvi at exponent 0.25 is to reach at least, and the best that a published policy had in the simulator."""

    workload: str
    capacity: int
    least: Both
    published: Both  # of hits and of compute, each policy at its best: rarely of the same one


GOALS = (
    Goal("conv", 1953, (0.110, 0.095), (0.118, 0.101)),
    Goal("conv", 5859, (0.190, 0.170), (0.180, 0.162)),
    Goal("conv", 10000, (0.240, 0.220), (0.244, 0.224)),
    Goal("cc", 1000, (0.335, 0.255), (0.295, 0.192)),
    Goal("cc", 2000, (0.550, 0.480), (0.501, 0.402)),
    Goal("cc", 5000, (0.835, 0.790), (0.837, 0.783)),
    Goal("mix", 5000, (0.225, 0.170), (0.178, 0.100)),
    Goal("mix", 10000, (0.370, 0.335), (0.353, 0.245)),
    Goal("mix", 20000, (0.585, 0.555), (0.558, 0.490)),
    Goal("agents", 100, (0.600, 0.530), (0.576, 0.505)),
    Goal("synth", 5859, (0.455, 0.480), (0.463, 0.481)),
    Goal("synth", 10000, (0.620, 0.650), (0.618, 0.641)),
)


@dataclass(frozen=True, slots=True)
class ChainGoal:
    """Time saved that rvi is to reach in a chain of tiers, and what LRU and Belady had in the simulator."""

    workload: str
    pages: tuple[int, int, int, int]  # of L1 to L4
    least: float
    simulated_lru: float
    simulated_belady: float


CHAIN_GOALS = (
    ChainGoal("conv", (300, 300, 1200, 9600), 0.175, 0.141, 0.313),
    ChainGoal("conv", (1000, 1000, 4000, 32000), 0.275, 0.253, 0.358),
    ChainGoal("cc", (200, 200, 800, 6400), 0.805, 0.774, 0.860),
    ChainGoal("cc", (500, 500, 2000, 16000), 0.890, 0.884, 0.922),
    ChainGoal("mix", (500, 500, 2000, 16000), 0.480, 0.214, 0.596),
    ChainGoal("mix", (1500, 1500, 6000, 48000), 0.785, 0.718, 0.846),
)
