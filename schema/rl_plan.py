"""RlPlan: pools of devices, the copies of models on each, the calls of a step, what moves between them, and runner-ups."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Frozen
from .plan import Estimate, Plan
from .rl import CallName, RlWorkload, Role
from .serving import Pool
from .serving_plan import layout_title
from .training_plan import TrainingPlan
from .units import counted, format_percent, format_seconds


class RlPool(Frozen):
    """Devices that copies of models share, by turns: ``num_devices`` from ``first_device`` on."""

    first_device: NonNegativeInt
    num_devices: PositiveInt
    roles: tuple[Role, ...] = Field(min_length=1)


class RlCopy(Frozen):
    """A copy of a model on the devices of a pool.

    Attributes:
        pool: index of it.
        training: how it is trained, or (forward passes only) run; None of the generator.
        serving: the engine instances of the generator; None of the others.
        state_bytes: what a device holds of it between its calls, where it stays; live_bytes: during its largest call.
        is_offloaded: it lies in the memory of the hosts except during its calls.
    """

    role: Role
    pool: NonNegativeInt
    training: TrainingPlan | None = None
    serving: Pool | None = None
    state_bytes: NonNegativeInt
    live_bytes: NonNegativeInt
    is_offloaded: bool = False

    @property
    def layout(self) -> str:
        """Return its layout in a line."""
        if self.serving is not None:
            return f"{self.serving.replicas} x {layout_title(self.serving.layout)}"
        assert self.training is not None
        return str(self.training.layout)


class RlSpan(Frozen):
    """Abstract base of what keeps the devices of a pool busy: when it begins in a step that waits for itself, how long it takes."""

    pool: NonNegativeInt
    start_s: NonNegativeFloat
    seconds: NonNegativeFloat

    @property
    def end_s(self) -> float:
        """Return when it ends."""
        return self.start_s + self.seconds


class RlCall(RlSpan):
    """A call of a step."""

    name: CallName
    role: Role


class RlMove(RlSpan):
    """A move of weights or states, for which the devices of the pool wait."""

    what: str
    size_bytes: NonNegativeInt


class RlEstimate(Estimate):
    """Predicted figures of a step.

    Attributes:
        step_time_s: between the ends of two steps; path_s: from the first token of a step to its last update.
        busy_s: of each pool in a step.
        samples_per_s: responses that are trained on; tokens_per_s: of all pools, prompts included.
        weights_s: to bring new weights to the generator.
        in_flight: steps whose samples are under way at once.
    """

    step_time_s: PositiveFloat
    path_s: PositiveFloat
    busy_s: tuple[NonNegativeFloat, ...]
    samples_per_s: PositiveFloat
    tokens_per_s_per_device: PositiveFloat
    weights_s: NonNegativeFloat
    in_flight: PositiveFloat = 1.0


class RlAlternative(Frozen):
    """The best placement of another kind, and why it was not taken."""

    title: str
    step_time_s: PositiveFloat
    reason: str


class RlPlan(Plan):
    """The answer of ``meshwright plan-rl``.

    Attributes:
        copies: the generator first, then as the workload lists them; calls, moves: of one step.
        search: its objective is the seconds of a step; candidates are partitions with devices.
        reason: why the generator shares the actor's devices, or why it does not.
    """

    task_field: ClassVar[str] = "post_training"
    task_name: ClassVar[str] = "post-training"

    post_training: RlWorkload
    pools: tuple[RlPool, ...] = Field(min_length=1)
    copies: tuple[RlCopy, ...] = Field(min_length=2)
    calls: tuple[RlCall, ...] = Field(min_length=2)
    moves: tuple[RlMove, ...] = ()
    estimate: RlEstimate
    reason: str = ""
    alternatives: tuple[RlAlternative, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if tuple(copy.role for copy in self.copies) != self.post_training.roles:
            raise ValueError(f"there must be a copy of each of {', '.join(self.post_training.roles)}, in this order")
        if self.model != self.post_training.model_of("actor"):
            raise ValueError("the model of the plan is the actor's")
        end = 0
        for idx, pool in enumerate(self.pools):
            if pool.first_device < end or pool.first_device + pool.num_devices > self.cluster.num_devices:
                raise ValueError(f"the devices of pool {idx} are those of another one, or not of the cluster")
            end = pool.first_device + pool.num_devices
        for copy in self.copies:
            if copy.pool >= len(self.pools) or copy.role not in self.pools[copy.pool].roles:
                raise ValueError(f"the {copy.role} is on pool {copy.pool}, which does not list it")
            if (copy.serving is None) == (copy.training is None) or (copy.serving is None) == (
                copy.role == "generator"
            ):
                raise ValueError(f"the {copy.role} needs {'instances' if copy.role == 'generator' else 'a layout'}")
            devices = copy.serving.num_devices if copy.serving else copy.training.layout.world_size  # type: ignore[union-attr]
            if devices > self.pools[copy.pool].num_devices:
                raise ValueError(f"the {copy.role} takes {devices} devices of {self.pools[copy.pool].num_devices}")
        return self

    @property
    def is_colocated(self) -> bool:
        """Tell whether the generator shares the actor's devices."""
        return self.copy_of("generator").pool == self.copy_of("actor").pool

    @property
    def waiting_s(self) -> float:
        """Return the seconds of a step whose levels wait for each other, as its calls and moves have them."""
        return max(span.end_s for span in (*self.calls, *self.moves))

    def copy_of(self, role: Role) -> RlCopy:
        """Return the copy of a role."""
        return next(copy for copy in self.copies if copy.role == role)

    @property
    def summary(self) -> dict[str, str]:
        """Return pools, seconds and rate."""
        cost, workload = self.estimate, self.post_training
        generation_s = next(call.seconds for call in self.calls if call.name == "generate")
        return super().summary | {
            "algorithm": f"{workload.algorithm}, {workload.samples:,} responses a step in {counted(workload.updates, 'update')}",
            "pools": pools_text(self.pools),
            "step time": format_seconds(cost.step_time_s),
            "rate": f"{cost.samples_per_s:.4g} responses/s, {cost.tokens_per_s_per_device:,.0f} tokens/s per device",
            "generation": f"{format_seconds(generation_s)}, {format_percent(generation_s / self.waiting_s, 0)} of a waiting step",
        }


def pools_text(pools: tuple[RlPool, ...]) -> str:
    """Return pools in a line: ``64: generator; 64: actor, reference``."""
    return "; ".join(f"{pool.num_devices}: {', '.join(pool.roles)}" for pool in pools)
