"""planning"""

from spalm.planning.plan import Cluster, Wanted, parse_count, plan
from spalm.planning.table import print_plan

__all__ = [
    "Cluster",
    "Wanted",
    "parse_count",
    "plan",
    "print_plan",
]
