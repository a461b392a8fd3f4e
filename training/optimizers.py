# SPDX-License-Identifier: Apache-2.0
"""Muon beside AdamW, and T5's Adafactor, as optimizers of a recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.optimization import Adafactor

_MOMENTUM = 0.95


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose parameter groups with `muon=True` are updated by Muon (momentum, then orthogonalisation).

    One optimizer rather than two, so that one learning-rate schedule and one saved state serve both.
    `torch.optim.Muon` orthogonalises in bfloat16, matrix by matrix: on a CPU that is several times slower than this
    float32 version, which stacks the matrices of one shape.

    Args:
        params: parameter groups; a group with `muon=True` holds matrices only.
        kwargs: as for `torch.optim.AdamW`.
    """

    def __init__(self, params: list[dict], **kwargs: float | tuple[float, float]):
        for group in params:
            group.setdefault("muon", False)
        super().__init__(params, **kwargs)  # type: ignore[arg-type]

    def __setstate__(self, state: dict) -> None:
        # AdamW wants a step count in every state that it restores; Muon needs none.
        for parameter_state in state["state"].values():
            parameter_state.setdefault("step", torch.tensor(0.0))
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group)
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _muon_step(self, group: dict) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        for (rows, columns), parameters in by_shape.items():
            updates = []
            for parameter in parameters:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].mul_(_MOMENTUM).add_(parameter.grad)
                updates.append(parameter.grad + _MOMENTUM * buffer)
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(parameters, orthogonalise(torch.stack(updates)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonalise(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """Bring the singular values of each matrix near 1 by the quintic Newton-Schulz iteration of Muon.

    Args:
        matrices: (num_matrices, rows, columns), any scale; a zero matrix stays zero.
        num_iterations: 5 brings singular values into about 0.7 to 1.2.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def parameter_groups(model: PreTrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of a model: hidden matrices, other matrices, and the rest.

    Args:
        model: embeddings, the LM head and tables that belong to no layer, such as the embeddings of memory and task
            tokens, are no hidden matrices.
    """
    tables: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    not_hidden = {id(p) for table in tables if table is not None for p in table.parameters()}
    groups: tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]] = ([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A layer's matrix is called so; whatever else has two dimensions is a table of vectors.
            is_hidden = parameter.ndim == 2 and name.endswith("weight") and id(parameter) not in not_hidden
            groups[0 if is_hidden else 1 if parameter.ndim >= 2 else 2].append(parameter)
    return groups


class OptimizerChoice(Trainer):
    """A `Trainer` that knows `optimizer: muon` and `optimizer: adafactor` in its arguments."""

    optimizer: torch.optim.Optimizer | None

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Create Muon for hidden matrices and AdamW for the rest, or T5's Adafactor, when the recipe says so."""
        args, model = self.args, model or self.model
        if self.optimizer is not None or args.optimizer == "adamw":
            return super().create_optimizer(model)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"optimizer: {args.optimizer} needs whole matrices, which DeepSpeed and FSDP cut up; take adamw, or "
                "DDP (accelerate/multi_gpu.yaml)"
            )
        hidden, matrices, vectors = parameter_groups(model)
        decay = args.weight_decay
        groups = [
            {"params": hidden, "lr": args.learning_rate, "weight_decay": decay},
            {"params": matrices, "lr": args.learning_rate, "weight_decay": decay},
            {"params": vectors, "lr": args.learning_rate, "weight_decay": 0.0},
        ]
        if args.optimizer == "adafactor":
            # T5's: updates are clipped at a root mean square of 1, before a rate that is relative to each parameter's.
            groups = [group for group in groups if group["params"]]
            scaling = {"scale_parameter": True, "relative_step": False, "warmup_init": False}
            self.optimizer = Adafactor(groups, lr=args.learning_rate, **scaling)
        else:
            groups[0] |= {"muon": True, "lr": args.muon_learning_rate}
            groups = [group for group in groups if group["params"]]
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonWithAdamW(groups, betas=betas, eps=args.adam_epsilon)
        return super().create_optimizer(model)
