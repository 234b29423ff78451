"""The nouns of Meshwright: frozen, validated data with a JSON round trip. Imports nothing else of the project."""

from .base import SCHEMA_VERSION
from .calibration import Calibration
from .cluster import ClusterSpec, Device, Link, LinkLevel, NodeGroup
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
from .plan import Alternative, Estimate, Plan, SearchCertificate, Stage
from .profile import Profile
from .workload import Workload

__all__ = [
    "SCHEMA_VERSION",
    "Alternative",
    "Calibration",
    "ClusterSpec",
    "ConfigError",
    "Device",
    "Estimate",
    "InfeasibleError",
    "Layout",
    "Link",
    "LinkLevel",
    "MeshwrightError",
    "ModelSpec",
    "NodeGroup",
    "Plan",
    "Profile",
    "ProfileError",
    "RuntimeMismatchError",
    "SearchCertificate",
    "SolverLimitError",
    "Stage",
    "Workload",
]
