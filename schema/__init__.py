"""The nouns of Meshwright: frozen, validated data with a JSON round trip. Imports nothing else of the project."""

from .base import SCHEMA_VERSION
from .cluster import ClusterSpec, Device, Link, LinkLevel, NodeGroup
from .errors import (
    ConfigError,
    InfeasibleError,
    MeshwrightError,
    ProfileError,
    RuntimeMismatchError,
    SolverLimitError,
)
from .generation import GenerationPlan
from .layout import Layout
from .model import ModelSpec
from .offers import CostSummary, Offer, ParetoPoint, SizeTried
from .offload import OffloadLimits, OffloadMarginalValues, OffloadSchedule
from .plan import Certificate, Estimate, Plan, PlanProvenance
from .profile import Calibration, Profile
from .rl import RlWorkload
from .rl_plan import RlPlan
from .serving import LatencyLimit, RequestClass, Requests, Serving
from .serving_plan import ServingPlan
from .stages import Stage
from .task import Generation, Workload
from .training_plan import Alternative, LeftOut, TrainingEstimate, TrainingPlan

__all__ = [
    "SCHEMA_VERSION",
    "Alternative",
    "Calibration",
    "ClusterSpec",
    "ConfigError",
    "CostSummary",
    "Device",
    "Estimate",
    "Generation",
    "GenerationPlan",
    "InfeasibleError",
    "LatencyLimit",
    "Layout",
    "LeftOut",
    "Link",
    "LinkLevel",
    "MeshwrightError",
    "ModelSpec",
    "NodeGroup",
    "Offer",
    "OffloadLimits",
    "OffloadSchedule",
    "OffloadMarginalValues",
    "ParetoPoint",
    "Plan",
    "PlanProvenance",
    "Profile",
    "ProfileError",
    "RequestClass",
    "RlPlan",
    "RlWorkload",
    "Requests",
    "RuntimeMismatchError",
    "Certificate",
    "Serving",
    "ServingPlan",
    "SizeTried",
    "SolverLimitError",
    "Stage",
    "TrainingEstimate",
    "TrainingPlan",
    "Workload",
]
