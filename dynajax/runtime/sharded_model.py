"""A model under a strategy, as a value: how it is stored, what a batch must look like, how it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dynajax.errors import StrategyError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, MoeConfig, ParameterSpec, Params, parameter_specs
from dynajax.runtime.order import TokenOrder, contiguous, zigzag
from dynajax.runtime.rules import BATCH_AXES, expert_axes, parameter_storage, replicated_axes


@dataclass(frozen=True)
class ShardedModel:
    """A model under a strategy. Hashable: with the shape of a batch it is the key of a compiled step.

    Attributes:
        config: shape of the model, dense or a mixture of experts.
        strategy: one pipeline.
        microbatches: parts of the rows of a batch that follow one another, with gradients added up.
        chunks: runs of layers that a pipeline stage has; more than 1 interleaves. Storage depends on it.
        dtype: of activations and matrix products.
        remat: compute each layer again in the backward pass; with several micro-batches each tick is anyway.

    Raises:
        StrategyError: the strategy has several pipelines, or experts that the model or its axes do not allow.
    """

    config: LlamaConfig
    strategy: Strategy
    microbatches: int = 1
    chunks: int = 1
    dtype: Any = jnp.float32
    remat: bool = False

    def __post_init__(self) -> None:
        if min(self.microbatches, self.chunks) < 1:
            raise StrategyError(f"{self.microbatches} micro-batches and {self.chunks} chunks: both must be 1 or more")
        axes = expert_axes(self.strategy)  # refuses several pipelines and layouts that the axes cannot make
        if self.strategy.pipelines[0].experts and not isinstance(self.config, MoeConfig):
            raise StrategyError(f"{self.strategy} lays out experts over {axes}, and the model is dense; drop the slash")

    @cached_property
    def storage(self) -> Params:
        """How each parameter is stored: a ``Storage`` in the place of each leaf of ``parameter_specs(config)``.

        ``shape`` and ``spec`` are those of the arrays that ``loss_and_metrics`` takes, ``to_storage`` makes them.
        Moments of a parameter are stored like it.
        """

        def store(parameter: ParameterSpec) -> Any:
            return parameter_storage(parameter, self.config, self.strategy, self.chunks)

        return jax.tree.map(store, parameter_specs(self.config))

    @property
    def replicated(self) -> dict[str, str]:
        """Logical axes that are whole on every rank of tp though tp could cut them, and why; to be shown once."""
        return replicated_axes(self.config, self.strategy)

    @property
    def padded(self) -> dict[str, tuple[int, int]]:
        """Logical axes that are stored longer than they are, with both sizes: ``{"heads": (6, 8)}``."""
        found: dict[str, tuple[int, int]] = {}
        parameters, storage = jax.tree.leaves(parameter_specs(self.config)), jax.tree.leaves(self.storage)
        for parameter, stored in zip(parameters, storage, strict=True):
            for name, dim in zip(parameter.axes, stored.dims, strict=True):
                if name is not None and dim.stored > dim.logical:
                    found[name] = (dim.logical, dim.stored)
        return found

    @property
    def row_multiple(self) -> int:
        """What must divide the rows of a batch (``dynajax.data.pad_rows``)."""
        return self.microbatches * math.prod(self.strategy.size(a) for a in BATCH_AXES)

    def token_order(self, length: int) -> TokenOrder:
        """The order in which to arrange rows of ``length`` tokens before they are put on the devices.

        Zig-zag over cp, which evens out the work. Contiguous where experts have a capacity: among tokens that
        want the same expert the first in the row win, so that another order would drop other tokens.
        """
        limited = isinstance(self.config, MoeConfig) and self.config.capacity_factor is not None
        cp = self.strategy.size("cp")
        return contiguous(length, cp) if limited or cp == 1 else zigzag(length, cp)
