"""Training without backward passes: gradients estimated from two forward passes (MeZO, arXiv:2305.17333, algorithm 1).

All trained parameters move by ``epsilon z`` and by ``-epsilon z``, z standard normal; with the mean losses l+ and l- of the same
batch, ``g = (l+ - l-) / (2 epsilon)`` is the derivative along z, and the step is ``-learning_rate (g z + weight_decay p)``. Nothing
is stored but the parameters: z is drawn again from its seed each time, in full for each parameter and cut as it is sharded, so that
every layout sees the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...schema.errors import RuntimeMismatchError
from ...schema.plan import Plan
from ..models.init import parameter_seed
from ..models.sharded import local_part, local_tensor

if TYPE_CHECKING:
    from ..parallel_model import ParallelModel


def require_zeroth_order(plan: Plan) -> None:
    """Refuse plans that cannot be trained so."""
    if plan.layout.pp > 1 or plan.offload is not None:
        raise RuntimeMismatchError(
            "zeroth-order training does not run over a pipeline, nor with an offload schedule",
            details=(f"pp {plan.layout.pp}, offload {plan.layout.offload}",),
            help="plan with --fix pp=1 and without --offload",
        )


EPSILON = 1e-3
"""Source: the paper's experiments (appendix E)."""


class ZerothOrderSGD(torch.optim.Optimizer):
    """SGD along a random direction: `losses` takes the place of a backward pass; `step` then takes the step.

    Attributes:
        num_steps: steps done, which z of the next one depends on; a resumed run sets it.
    """

    def __init__(
        self, model: ParallelModel, groups: list[dict[str, Any]], *, learning_rate: float, seed: int = 0
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._seed = seed
        self._slope = 0.0
        self.num_steps = 0

    @torch.no_grad()
    def losses(self, tokens: Tensor) -> Tensor:
        """Return what this rank adds to the mean loss, [] on the device, half way between the two losses.

        No gradient remains anywhere.
        """
        self._move(EPSILON)
        above = self._model.forward(tokens)
        self._move(-2 * EPSILON)
        below = self._model.forward(tokens)
        self._move(EPSILON)
        difference = above.double() - below.double()
        self._model.add_over_ranks(difference)
        self._slope = difference.item() / (2 * EPSILON)
        return (above + below) / 2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Along z, by the slope that `losses` found."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                local = local_tensor(parameter)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(self._direction(parameter), alpha=-group["lr"] * self._slope)
        self.num_steps += 1

    def _move(self, distance: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local_tensor(parameter).add_(self._direction(parameter), alpha=distance)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Return the part of z that this rank has."""
        name = self._names[parameter]
        if name == "lm_head.weight" and self._model.plan.model.tie_embeddings:
            name = "model.embed_tokens.weight"
        device = local_tensor(parameter).device
        seed = parameter_seed(self._seed, f"{self.num_steps}/{name}")
        generator = torch.Generator(device).manual_seed(seed)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(generator=generator)
        return local_part(full, parameter)
