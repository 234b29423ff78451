"""What a copy of a model costs on pools of each size: seconds of its calls, bytes of a device, and its layout there.

generator    every engine instance that fits (planner/serving/space.py), as many as fill the pool; the quickest rollout
             (cost_models/serving/rollout.py)
actor,       the fastest layout of the search for training, on packs that hold all tokens of an update, as long as the longest
critic       sample where that fills the devices; their scores are forward passes under the same layout
others       the fastest layout of forward passes alone: zeroth-order training is two of them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...cost_models.hardware.machine import peak_flops_per_s
from ...cost_models.hardware.streams import host_rates
from ...cost_models.serving.memory import CONTEXT_BYTES
from ...cost_models.serving.rollout import cached_tokens, concurrent_rows, steady_rollout
from ...schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, TrainingEstimate, TrainingPlan, Workload
from ...schema.layers import Embedding
from ...schema.offers import with_devices_per_node, with_nodes
from ...schema.rl import CALLS, TRAINED, CallName, RlWorkload, Role
from ...schema.serving import BYTES_OF, Pool, RequestClass, Requests, Serving, WeightDtype
from ...schema.task import FULL_PRECISIONS, Precision
from ..expand import Candidate
from ..request import PlanRequest
from ..search import SearchResult
from ..serving.kinds import InstanceKind
from ..serving.space import ServingSpace
from ..tasks.training import plan_candidate, search_layouts

GENERATION = 1.61
"""Times as long generation takes inside post-training engines as by the models of serving, updates as long as predicted: tokens'
log-probabilities, uneven prompts, the driver. [fitted: benchmarks/post_training.py, median over verl's colocated runs]"""

PACK_MULTIPLE = 128
"""Packs have a multiple of so many tokens, which every degree of context and sequence parallelism divides."""


def sizes_of(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the sizes of pools: divisors of a node, powers of two of nodes and (from an eighth of the cluster on) three times
    them, and all nodes.

    Raises:
        ConfigError: the nodes are not all alike.
    """
    if len(cluster.groups) > 1:
        raise ConfigError(
            f"{cluster.name} has {len(cluster.groups)} kinds of nodes", help="plan post-training on nodes of one kind"
        )
    node, nodes = cluster.groups[0].devices_per_node, cluster.num_nodes
    powers = [1 << k for k in range(nodes.bit_length())]
    counts = {nodes, *powers, *(3 * power for power in powers if nodes <= 24 * power <= 8 * nodes)}
    return tuple(sorted({*(n for n in range(1, node) if node % n == 0), *(node * count for count in counts)}))


def pool_cluster(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return the first devices of a cluster as one of its own."""
    node = cluster.groups[0].devices_per_node
    if num_devices >= node:
        return with_nodes(cluster, num_devices // node)
    return with_devices_per_node(with_nodes(cluster, 1), num_devices)


@dataclass(frozen=True, kw_only=True)
class CopyCosts:
    """A copy of a model on a pool of a size.

    Attributes:
        seconds, live_bytes: of its calls; state_bytes: of a device between them.
        move_s: to bring its state to the host, or back.
        kind, replicas: the instances of a generator; candidate, result: the layout of another copy and the search that it is from.
    """

    seconds: dict[CallName, float]
    live_bytes: dict[CallName, float]
    state_bytes: float = 0.0
    move_s: float = 0.0
    kind: InstanceKind | None = None
    replicas: int = 0
    request: PlanRequest | None = field(default=None, repr=False)
    candidate: Candidate | None = field(default=None, repr=False)
    result: SearchResult | None = field(default=None, repr=False)

    def training(self) -> TrainingPlan | None:
        """Return the layout as a plan; None of a generator."""
        if self.candidate is None or self.result is None or self.request is None:
            return None
        layout = self.candidate.layout(self.result.costs.layouts)
        return plan_candidate(self.request, layout, self.candidate, self.result.certificate())

    def serving(self) -> Pool | None:
        """Return the engine instances; None of another copy than the generator."""
        return None if self.kind is None else self.kind.pool("agg", self.replicas)


class CostBook:
    """Costs of the copies of a workload, worked out when they are asked for.

    Attributes:
        fixed: fields of the layouts of trained copies that searches must keep; instances: the same of the generator.
    """

    def __init__(
        self,
        request: PlanRequest,
        workload: RlWorkload,
        *,
        fixed: dict[str, object] | None = None,
        instances: dict[str, object] | None = None,
    ) -> None:
        self.request, self.workload, self.cluster = request, workload, request.cluster
        self.fixed, self.instances = fixed or {}, instances or {}
        self._known: dict[tuple[object, ...], CopyCosts | None] = {}
        self.reasons: dict[Role, str] = {}

    def costs(self, role: Role, num_devices: int, *, below_s: float = math.inf) -> CopyCosts | None:
        """Return what a copy costs on so many devices; None where it does not fit there, or its calls take ``below_s`` or more."""
        model = self.workload.model_of(role)
        key = (
            "generator" if role == "generator" else model.content,
            role in TRAINED,
            *self._degrees_of(role),
            num_devices,
        )
        if key not in self._known:
            self.request.deadline.require(f"costing the {role} on {num_devices} devices")
            make = self._generator if role == "generator" else self._trained if role in TRAINED else self._scoring
            try:
                self._known[key] = make(role, num_devices, below_s)
            except (ConfigError, InfeasibleError) as error:
                self.reasons.setdefault(role, error.message)
                self._known[key] = None
        costs = self._known[key]
        return None if costs is None else _for_role(costs, role)

    def lower_bound_s(self, role: Role, num_devices: int) -> float:
        """Return seconds that the calls of a copy are not below: its products at the peak rate."""
        workload, model = self.workload, self.workload.model_of(role)
        flops = _forward_flops(model)
        precision = "fp8" if role == "generator" and self._has_fp8 else workload.precision
        peak = peak_flops_per_s(self.cluster.weakest_device, precision)
        if role == "generator":
            return flops * workload.generated * workload.lengths.mean / (num_devices * peak)
        passes = 4 if role in TRAINED else 1  # a score, and an update of three times as much
        return passes * flops * workload.tokens_per_step / (num_devices * peak)

    @property
    def _has_fp8(self) -> bool:
        return self.cluster.weakest_device.peak_flops_per_s.fp8 is not None

    def packed(self, samples: int, num_devices: int, **fields: object) -> Workload:
        """Return a training workload of packs with the tokens of so many samples.

        As many packs as devices can share evenly, none longer than the longest sample.
        """
        workload = self.workload
        tokens = samples * (workload.prompt_len + workload.lengths.mean)
        min_packs = max(1, math.ceil(tokens / workload.longest))
        shared = math.gcd(num_devices, 1 << max(min_packs.bit_length() - 1, 0))
        count = math.ceil(min_packs / shared) * shared
        length = math.ceil(tokens / count / PACK_MULTIPLE) * PACK_MULTIPLE
        return Workload(
            seq_len=length, global_batch_size=count, engine=workload.engine, precision=workload.precision,
            document_len=min(length, workload.sequences.attended_len(workload.longest)),
        ).replace(**fields)  # fmt: skip

    def _search(
        self, role: Role, workload: Workload, num_devices: int, below_s: float
    ) -> tuple[PlanRequest, SearchResult]:
        model, cluster = self.workload.model_of(role), pool_cluster(self.cluster, num_devices)
        fixed = {**(self.fixed if role in TRAINED else {}), **dict.fromkeys(self._degrees_of(role), 1)}
        request = replace(
            PlanRequest.create(model, cluster, workload, fixed=fixed, runnable=self.request.runnable or None),
            deadline=self.request.deadline,
        )
        result = search_layouts(request, worse_than_s=below_s)
        if not result.feasible:
            raise InfeasibleError(f"no layout of {model.name} fits {num_devices} devices")
        return request, result

    def _degrees_of(self, role: Role) -> tuple[str, ...]:
        """Return the degrees that are one on CPUs, where `apply-rl` runs the plan (runtime/rl/copies.py)."""
        if not self.cluster.weakest_device.backend.is_host:
            return ()
        return ("pp", "cp", "tp") if role == "critic" else ("pp", "cp")

    def _trained(self, role: Role, num_devices: int, below_s: float) -> CopyCosts:
        """Return the fastest layout that trains, with scores of the same layout."""
        updates = self.workload.updates
        packed = self.packed(self.workload.samples // updates, num_devices)
        request, result = self._search(role, packed, num_devices, below_s / updates)
        candidate = result.feasible[0]
        estimate = candidate.estimate
        layout = candidate.layout(result.costs.layouts)
        passes = math.ceil(packed.global_batch_size / (layout.dp * layout.micro_batch_size))
        parts = estimate.memory_bytes
        state = parts.parameters + parts.optimizer
        forward = float(state + parts.unsharded + parts.temporary + parts.logits)
        update, score = ("update_actor", "log_probs") if role == "actor" else ("update_critic", "values")
        return CopyCosts(
            seconds={update: updates * estimate.step_time_s, score: updates * forward_s(estimate, passes)},  # type: ignore[dict-item]
            live_bytes={update: float(estimate.required_bytes), score: min(forward, float(estimate.required_bytes))},  # type: ignore[dict-item]
            state_bytes=float(state), move_s=self._move_s(state, packed), request=request, candidate=candidate, result=result,
        )  # fmt: skip

    def _scoring(self, role: Role, num_devices: int, below_s: float) -> CopyCosts:
        """Return the fastest layout of forward passes alone."""
        packed = self.packed(
            self.workload.samples, num_devices, engine="fsdp2", passes="zeroth_order", optimizer="sgd",
            precision=_plain(self.workload.precision),
        )  # fmt: skip
        request, result = self._search(role, packed, num_devices, 2 * below_s)
        candidate = result.feasible[0]
        estimate = candidate.estimate
        seconds = (estimate.step_time_s - estimate.breakdown_s.optimizer) / 2
        state = estimate.memory_bytes.parameters
        return CopyCosts(
            seconds={role: seconds}, live_bytes={role: float(estimate.required_bytes)},  # type: ignore[dict-item]
            state_bytes=float(state), move_s=self._move_s(state, packed), request=request, candidate=candidate, result=result,
        )  # fmt: skip

    def _move_s(self, size_bytes: float, workload: Workload) -> float:
        return size_bytes / host_rates(workload, self.cluster).link_bytes_per_s

    @cached_property
    def host_bytes(self) -> float:
        """Return the bytes of the host's memory for each device."""
        return host_rates(self.packed(1, 1), self.cluster).memory_bytes

    @cached_property
    def _space(self) -> ServingSpace:
        workload = self.workload
        dtype: WeightDtype = "fp32" if workload.precision in FULL_PRECISIONS else "bf16"
        longest = workload.lengths.lengths[-1]
        serving = Serving(
            requests=Requests(classes=(RequestClass(prompt_len=workload.prompt_len, output_len=longest),), concurrency=1),
            engine=workload.generation_engine, modes=("agg",), weights=dtype,
        )  # fmt: skip
        request = PlanRequest.create(
            workload.model_of("generator"), self.cluster, serving, fixed=self.instances, deadline=self.request.deadline
        )
        return ServingSpace.build(request, serving)

    def _generator(self, role: Role, num_devices: int, _below_s: float) -> CopyCosts:
        """Return the instances that end a rollout first."""
        best: CopyCosts | None = None
        for kind in self._space.kinds:
            if num_devices % kind.size:
                continue
            costs = self.instances_costs(kind, num_devices // kind.size)
            if best is None or costs.seconds["generate"] < best.seconds["generate"]:
                best = costs
        if best is None:
            reason = next((reason for _, reason in self._space.too_large), "instances are larger than the pool")
            raise InfeasibleError(f"no engine instance of {self.workload.model_of(role).name} fits: {reason}")
        return best

    def instances_costs(self, kind: InstanceKind, replicas: int) -> CopyCosts:
        """Return what a rollout on equal instances costs: the responses of a prompt go to the same one."""
        workload, memory = self.workload, kind.memory
        samples = math.ceil(workload.generated / (replicas * kind.model.lanes))
        result = steady_rollout(
            kind.model, workload.lengths, workload.prompt_len, samples, oversample=workload.oversample,
            shared_prompts=min(workload.responses, samples), among=workload.generated,
        )  # fmt: skip
        rows = min(
            concurrent_rows(kind.model, workload.lengths, workload.prompt_len), math.ceil(samples * workload.oversample)
        )
        per_token = memory.cache_bytes / max(memory.cache_tokens, 1)
        cache = min(
            memory.cache_bytes, per_token * kind.layout.pp * cached_tokens(workload.lengths, workload.prompt_len, rows)
        )
        live = (
            memory.weight_bytes
            + memory.workspace_bytes
            + memory.graph_bytes
            + max(memory.context_bytes - CONTEXT_BYTES, 0)
        )
        slower = 1.0 if workload.generation_engine == "meshwright" else GENERATION
        return CopyCosts(
            seconds={"generate": slower * result.seconds},
            live_bytes={"generate": live + cache},
            kind=kind,
            replicas=replicas,
        )

    def send_s(self, trained_devices: int, generator_devices: int) -> float:
        """Return the seconds until every device of the generator has seen all new weights: it receives them once (docs)."""
        both = pool_cluster(self.cluster, max(trained_devices, generator_devices))
        if trained_devices == generator_devices == 1 or both.num_devices == 1:
            return self.weight_bytes / self.cluster.weakest_device.memory_bandwidth_bytes_per_s
        link = both.levels[-1].link
        return self.weight_bytes / (link.bandwidth_bytes_per_s * min(link.efficiency.p2p, 1.0))

    @cached_property
    def weight_bytes(self) -> float:
        """Return the bytes of the weights that generate, all of them."""
        dtype = self._space.kinds[0].weights if self._space.kinds else "bf16"
        return self.workload.model_of("generator").num_params * BYTES_OF[dtype]


def forward_s(estimate: TrainingEstimate, num_passes: int) -> float:
    """Return the seconds of forward passes alone: as many as micro-batches, and the filling of the pipeline."""
    return (num_passes + len(estimate.stages) - 1) * max(stage.forward_s for stage in estimate.stages)


def _for_role(costs: CopyCosts, role: Role) -> CopyCosts:
    """Return the costs with the names of a role's calls: copies of one model cost the same."""
    if role == "generator":
        return costs
    names = [name for name, (owner, _) in CALLS.items() if owner == role]
    if set(names) == set(costs.seconds):
        return costs
    others = sorted(costs.seconds, key=lambda name: CALLS[name][1])
    pairs = list(zip(sorted(names, key=lambda name: CALLS[name][1]), others, strict=True))
    return replace(
        costs, seconds={new: costs.seconds[old] for new, old in pairs},
        live_bytes={new: costs.live_bytes[old] for new, old in pairs},
    )  # fmt: skip


def _plain(precision: Precision) -> Precision:
    """Return the precision of forward passes without master parameters."""
    return "bf16" if precision in ("bf16-mixed", "fp8", "nvfp4") else precision


def _forward_flops(model: ModelSpec) -> float:
    """Return the FLOPs of a token in the products of a forward pass, attention left out."""
    looked_up = sum(
        run.count * run.layer.num_params(model.hidden_dim) for run in model.layers if isinstance(run.layer, Embedding)
    )
    return 2.0 * max(model.num_active_params - looked_up * (not model.tie_embeddings), 1)
