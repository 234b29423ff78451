"""Post-training plans made by hand, for runs and exports: a tiny model on CPUs; all figures are made up."""

from __future__ import annotations

from typing import Any

from meshwright.schema import Layout, RlPlan, Workload
from meshwright.schema.batch import Lengths
from meshwright.schema.rl import RlLoss, RlModel, RlWorkload, Role
from meshwright.schema.rl_plan import RlCall, RlCopy, RlEstimate, RlPool
from meshwright.schema.serving import EngineLimits, Pool, ServingLayout
from plans import cpu_cluster, make_plan, tiny_model

VOCABULARY = 16
MODEL = tiny_model(num_blocks=2, vocab_size=VOCABULARY, hidden_dim=64, ffn_dim=128, head_dim=16)
LIMITS = EngineLimits(max_batch=64, max_batched_tokens=512, chunk=512, cache_blocks=256)


def rl_plan(
    pools: list[tuple[int, tuple[Role, ...]]], layouts: dict[str, Layout], *, tp: int = 1, **fields: Any
) -> RlPlan:
    """A plan by hand: sizes and roles of pools, layouts of copies, tp of the generator; figures are made up."""
    roles = [role for _, of_pool in pools for role in of_pool]
    work = RlWorkload(
        models=tuple(RlModel(role=role, model=MODEL) for role in ("actor", "critic", "reference", "teacher") if role in roles),  # type: ignore[arg-type]
        reward_function="rewards.py:count",
        algorithm="ppo" if "critic" in roles else "grpo",
        **{
            "prompts": 4, "responses": 4, "prompt_len": 4, "lengths": Lengths(lengths=(6,), counts=(1,)), "max_len": 6,
            "precision": "fp32", "generation_engine": "meshwright", "loss": RlLoss(temperature=0.0), **fields,
        },
    )  # fmt: skip
    of = {role: idx for idx, (_, of_pool) in enumerate(pools) for role in of_pool}
    firsts = [sum(size for size, _ in pools[:idx]) for idx in range(len(pools))]
    training = Workload(seq_len=32, global_batch_size=64, precision="fp32")
    copies = []
    for role in work.roles:
        size = pools[of[role]][0]
        if role == "generator":
            serving = Pool(
                device="cpu",
                replicas=size // tp,
                layout=ServingLayout(tp=tp),
                weights="fp32",
                cache="fp32",
                limits=LIMITS,
            )
            copies.append(RlCopy(role=role, pool=of[role], serving=serving, state_bytes=0, live_bytes=1))
            continue
        layout = layouts.get(role, Layout(dp_replicate=size))
        copies.append(
            RlCopy(
                role=role,
                pool=of[role],
                training=make_plan(MODEL, layout, workload=training),
                state_bytes=1,
                live_bytes=1,
            )
        )
    return RlPlan(
        model=MODEL,
        cluster=cpu_cluster(sum(size for size, _ in pools)),
        post_training=work,
        pools=tuple(
            RlPool(first_device=first, num_devices=size, roles=of_pool)
            for first, (size, of_pool) in zip(firsts, pools, strict=True)
        ),
        copies=tuple(copies),
        calls=tuple(
            RlCall(name=name, role="actor", pool=0, start_s=0, seconds=1) for name in ("generate", "update_actor")
        ),
        estimate=RlEstimate(
            tokens_per_s=1,
            step_time_s=1,
            path_s=1,
            busy_s=(1,),
            samples_per_s=1,
            tokens_per_s_per_device=1,
            weights_s=0,
        ),
    )
