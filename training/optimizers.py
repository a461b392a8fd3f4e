# SPDX-License-Identifier: Apache-2.0
"""Muon for the hidden matrices with AdamW for everything else, as one optimizer; Adafactor as T5 has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.optimization import Adafactor


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose parameter groups with `muon=True` are updated by Muon (momentum, then orthogonalisation).

    One optimizer rather than two, so that one learning-rate schedule and one saved state serve both.
    `torch.optim.Muon` orthogonalises in bfloat16, matrix by matrix: on a CPU that is several times slower than this
    float32 version, which stacks the matrices of one shape.

    Args:
        params: parameter groups; a group with `muon=True` holds matrices only and uses `lr` and `momentum`.
        lr: learning rate of groups that give none.
        momentum: of the Muon groups.
        betas: of the AdamW groups.
        eps: of the AdamW groups.
        weight_decay: of groups that give none (decoupled in both).
        share_work: whether the processes of the default group, which all hold the same gradients (plain DDP), each
            orthogonalise a part of the matrices and hand it to the others.

    Raises:
        ValueError: a Muon group with a parameter that is not a matrix.
    """

    def __init__(
        self,
        params: list[dict],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        share_work: bool = False,
    ):
        self.share_work = share_work
        for group in params:
            group.setdefault("muon", False)
            group.setdefault("momentum", momentum)
            group["params"] = list(group["params"])
            if group["muon"] and any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon updates matrices only: put other parameters into a group without muon=True")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def __setstate__(self, state: dict) -> None:
        # AdamW wants a step count in every state that it restores; Muon needs none.
        for parameter_state in state["state"].values():
            parameter_state.setdefault("step", torch.tensor(0.0))
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        # torch types a step with and without a closure apart.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group)
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            super().step()
        finally:
            self.param_groups = groups
        return loss

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
                buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                updates.append(parameter.grad + group["momentum"] * buffer)
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            orthogonal = orthogonalise_together if self.share_work else orthogonalise
            for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonalise(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """Bring the singular values of each matrix near 1 by the quintic Newton-Schulz iteration of Muon.

    Args:
        matrices: (num_matrices, rows, columns), any scale; a zero matrix stays zero.
        num_iterations: 5 brings singular values into about 0.7 to 1.2.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def orthogonalise_together(matrices: torch.Tensor) -> torch.Tensor:
    """`orthogonalise`, of which each process does an equal part.

    Args:
        matrices: (num_matrices, rows, columns), the same in all processes of the default group.
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    share = -(-len(matrices) // world)
    mine = matrices[rank * share : (rank + 1) * share]
    part = torch.zeros_like(matrices[:1]).repeat(share, 1, 1)
    part[: len(mine)] = orthogonalise(mine)
    parts = [torch.empty_like(part) for _ in range(world)]
    torch.distributed.all_gather(parts, part)
    return torch.cat(parts)[: len(matrices)]


def parameter_groups(
    model: PreTrainedModel, optimizer: str, learning_rate: float, muon_learning_rate: float, weight_decay: float
) -> list[dict]:
    """Split the trainable parameters of a model: hidden matrices (Muon, if asked), other matrices, the rest.

    Args:
        model: every `nn.Embedding`, such as T5's relative biases of its attention, the module of
            `get_input_embeddings` and that of `get_output_embeddings` are no hidden matrices; nor are tables that
            belong to no layer, such as the embeddings of memory and task tokens.
        optimizer: "muon", or another one, which has no group of hidden matrices.
        learning_rate: of the groups that are not Muon's.
        muon_learning_rate: of Muon.
        weight_decay: of every matrix; vectors have none.
    """
    tables: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    not_hidden = {id(p) for table in tables if table is not None for p in table.parameters()}
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A layer's matrix is called so; whatever else has two dimensions is a table of vectors.
            is_matrix = parameter.ndim == 2 and name.rpartition(".")[2] == "weight" and id(parameter) not in not_hidden
            is_hidden = optimizer == "muon" and is_matrix
            (hidden if is_hidden else matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"params": hidden, "muon": True, "lr": muon_learning_rate, "weight_decay": weight_decay},
        {"params": matrices, "muon": False, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": vectors, "muon": False, "lr": learning_rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adafactor(model: nn.Module, learning_rate: float, weight_decay: float = 0.0) -> Adafactor:
    """Adafactor as T5 was trained with it: the learning rate is relative to the root mean square of each parameter.

    Updates are clipped at a root mean square of 1, before the rate is applied, and have no momentum. transformers' own
    `optim: adafactor` is another: its rate is absolute.

    Args:
        model: whose trainable parameters are updated.
        learning_rate: T5's is 1 / sqrt(step) in pretraining and 1e-3 in fine-tuning.
        weight_decay: of every matrix; vectors have none.
    """
    groups = parameter_groups(model, "adafactor", learning_rate, learning_rate, weight_decay)
    groups = [{name: group[name] for name in ("params", "lr", "weight_decay")} for group in groups]
    return Adafactor(groups, lr=learning_rate, scale_parameter=True, relative_step=False, warmup_init=False)


class OptimizerChoice(Trainer):
    """A `Trainer` that knows `optimizer: muon` and `optimizer: adafactor` in its arguments."""

    optimizer: torch.optim.Optimizer | None

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Muon for hidden matrices and AdamW for the rest, or T5's Adafactor, when the recipe says so."""
        args, model = self.args, model or self.model
        if self.optimizer is not None or args.optimizer == "adamw":
            return super().create_optimizer(model)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"optimizer: {args.optimizer} needs whole matrices, which DeepSpeed and FSDP cut up; take adamw, or "
                "DDP (accelerate/multi_gpu.yaml)"
            )
        if args.optimizer == "adafactor":
            self.optimizer = adafactor(model, args.learning_rate, args.weight_decay)
        else:
            groups = parameter_groups(model, "muon", args.learning_rate, args.muon_learning_rate, args.weight_decay)
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonWithAdamW(
                groups,
                momentum=args.muon_momentum,
                betas=betas,
                eps=args.adam_epsilon,
                share_work=args.world_size > 1,
            )
        return super().create_optimizer(model)
