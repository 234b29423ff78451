"""The nouns of Meshwright: frozen, validated data with a JSON round trip. Imports nothing else of the project."""

from .base import SCHEMA_VERSION
from .calibration import Calibration
from .cluster import ClusterSpec, Device, Link, LinkLevel, NodeGroup
from .cost_summary import CostSummary, ParetoPoint, SizeTried
from .errors import (
    ConfigError,
    InfeasibleError,
    MeshwrightError,
    ProfileError,
    RuntimeMismatchError,
    SolverLimitError,
)
from .layout import Layout
from .model import ModelSpec
from .offers import Offer
from .offload import OffloadAllowed, OffloadSchedule, OffloadWorth
from .plan import Alternative, Estimate, Plan, SearchCertificate, Stage
from .profile import Profile
from .workload import Workload

__all__ = [
    "SCHEMA_VERSION",
    "Alternative",
    "Calibration",
    "ClusterSpec",
    "ConfigError",
    "CostSummary",
    "Device",
    "Estimate",
    "InfeasibleError",
    "Layout",
    "Link",
    "LinkLevel",
    "MeshwrightError",
    "ModelSpec",
    "NodeGroup",
    "Offer",
    "OffloadAllowed",
    "OffloadSchedule",
    "OffloadWorth",
    "ParetoPoint",
    "Plan",
    "Profile",
    "ProfileError",
    "RuntimeMismatchError",
    "SearchCertificate",
    "SizeTried",
    "SolverLimitError",
    "Stage",
    "Workload",
]
