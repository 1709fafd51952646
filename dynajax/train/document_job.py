"""Jobs that train on documents of any length: unlike pipelines side by side, chosen and filled anew in each step.

The state lies in the optimizer layout, which is the same for all strategies on the same devices: a change of strategy
moves nothing. Other devices are a switch like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.balance import Planner
from dynajax.data import DocumentSteps
from dynajax.engine import Stored
from dynajax.errors import BalanceError, StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import LlamaConfig, MoeConfig
from dynajax.runtime.gradients import abstract_params
from dynajax.runtime.optimizer_layout import flat_mesh, flatten_leaf, optimizer_layout
from dynajax.runtime.pipeline_runner import PipelineRunner
from dynajax.train.balancing import Balancing, even_pipelines
from dynajax.train.candidates import Asked, Auto, Candidates, read_asked
from dynajax.train.document_step import DocumentStep, FlatPrograms
from dynajax.train.elementwise import require_elementwise
from dynajax.train.fit import require_fit
from dynajax.train.job import DEFAULT_OPTIONS, NO_MESH, Job, StepOptions
from dynajax.train.state import TrainState, abstract_arrays, mirrors


@dataclass(frozen=True, eq=False)
class DocumentJob(Job[Candidates]):
    """A job that takes the documents of a step under any strategy of several pipelines.

    Attributes:
        data: the documents of each step.
        balancing: how they are shared out.

    Raises:
        StrategyError: the optimizer or the model cannot be trained by pipelines side by side.
    """

    data: DocumentSteps
    balancing: Balancing

    @staticmethod
    def of(
        model: LlamaConfig,
        optimizer: optax.GradientTransformation,
        data: DocumentSteps,
        devices: Sequence[jax.Device],
        balancing: Balancing,
        options: StepOptions = DEFAULT_OPTIONS,
    ) -> DocumentJob:
        """The job that trains ``model`` on ``data``."""
        job = DocumentJob(model, optimizer, tuple(devices), options, data, balancing)
        if isinstance(model, MoeConfig) and (model.balance_weight or model.z_weight):
            raise StrategyError(
                f"the losses of the routers (weights {model.balance_weight:g} and {model.z_weight:g}) are means over "
                "all documents, which no pipeline knows alone; take balance_weight=0 and z_weight=0, or train on rows"
            )
        if isinstance(model, MoeConfig) and model.capacity_factor is not None:
            raise StrategyError(
                f"with capacity_factor={model.capacity_factor:g} what an expert drops depends on which documents share "
                "a row, and that changes with the strategy; take capacity_factor=None, or train on rows"
            )
        require_elementwise(optimizer, job.shapes.params)
        return job

    def place(self, strategy: str | Strategy | Asked | Candidates) -> Candidates:
        """Read ``auto``, a strategy, or either with devices as in ``auto@0-7``.

        Raises:
            StrategyError: it cannot be read, or fits neither the model nor the devices.
            BalanceError: no pipeline holds the longest document.
        """
        if isinstance(strategy, Candidates):
            return strategy
        asked = read_asked(strategy)
        if asked not in self._placements:
            self._placements[asked] = self._checked(asked)
        return self._placements[asked]

    @cached_property
    def _placements(self) -> dict[Asked, Candidates]:
        """What was read and checked: strategies are proposed once, not in each switch."""
        return {}

    def _checked(self, asked: Asked) -> Candidates:
        if isinstance(asked, Auto):
            devices = asked.devices or tuple(range(len(self.devices)))
            found = Candidates(asked.text, self.balancing.propose(self.model, self.data, len(devices)), devices)
        else:
            found = Candidates.one(asked)
        for index in range(len(found.strategies)):
            for pipeline in found.pipelines(index):
                require_fit(self.model, pipeline, len(self.devices))
        idle = {d.process_index for d in self.devices} - {self.devices[n].process_index for n in found.devices}
        if idle:
            raise StrategyError(f"{found} has no device of the processes {sorted(idle)}; take some of each process")
        self.planner(found)
        return found

    def alone(self, placement: Candidates) -> Candidates:
        """The smallest pipeline that holds the longest document, alone: what several together are compared with.

        Raises:
            BalanceError: none does.
        """
        pipelines = even_pipelines(self.model, len(placement.devices))
        costs = [c for c in self.balancing.costs(self.model, pipelines) if c.max_len >= self.data.longest]
        if not costs:
            raise BalanceError(f"no pipeline of {len(placement.devices)} devices holds {self.data.longest} tokens")
        smallest = min(costs, key=lambda cost: (cost.devices, cost.pp))
        return Candidates.one(Placement(Strategy((smallest.pipeline,)), placement.devices[: smallest.devices]))

    def planner(self, placement: Candidates) -> Planner:
        """Plans iterations over the strategies of ``placement``.

        Raises:
            BalanceError: a pipeline has no price, or none holds the longest document.
        """
        kinds = dict.fromkeys(p for strategy in placement.strategies for p in strategy.pipelines)
        planner = Planner(placement.strategies, self.balancing.costs(self.model, tuple(kinds)), self.balancing.options)
        planner.plan([self.data.longest])
        return planner

    def layout(self, placement: Candidates) -> TrainState:
        """The optimizer layout: flat over all devices; what mirrors no parameter is whole on each."""
        mesh = self._mesh(placement)
        flat, whole = optimizer_layout(self.shapes, mesh), NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda is_flat, bundle, x: bundle if is_flat else Stored.plain(whole, x.shape),
            self._is_flat,
            flat,
            self.shapes,
        )

    def arrangement(self, placement: Candidates) -> Callable[[TrainState], TrainState]:
        """Flattens tensors."""
        parts, is_flat = len(placement.devices), self._is_flat

        def arranged(path: Any, flat: bool, x: jax.Array) -> jax.Array:
            return flatten_leaf(path, x, parts) if flat else x

        return lambda state: jax.tree_util.tree_map_with_path(arranged, is_flat, state)

    def compile_step(self, placement: Candidates, layout: TrainState) -> DocumentStep:
        """Compile every program that any strategy of ``placement`` may need, as far as that was not done before."""
        planner = self.planner(placement)
        placed = dict.fromkeys(p for index in range(len(placement.strategies)) for p in placement.pipelines(index))
        runners = {pipeline: self._runner(placement, pipeline) for pipeline in placed}
        sections = [pair for r in runners.values() for pair in zip(r.sections, r.links, strict=True)]
        pushed = {section.span: abstract_params(link.target, jnp.float32) for section, link in sections}
        flat = FlatPrograms.of(self.optimizer, abstract_arrays(self.shapes, layout), self.options.dtype, pushed)
        return DocumentStep(placement, layout, self.data, planner, runners, flat)

    def _runner(self, placement: Candidates, pipeline: Placement) -> PipelineRunner:
        key = pipeline, placement.devices
        if key not in self._runners:
            shapes, kinds = self.balancing.shapes, pipeline.strategy.pipelines
            (cost,) = shapes.limit(self.balancing.costs(self.model, kinds))
            run, mesh = self.options.of_pipeline(self.model, pipeline.strategy), pipeline.mesh(self.devices)
            with jax.set_mesh(NO_MESH):
                self._runners[key] = PipelineRunner.of(
                    run, mesh, self._mesh(placement), shapes.rows(cost), shapes.max_segments
                )
        return self._runners[key]

    @cached_property
    def _runners(self) -> dict[tuple[Placement, tuple[int, ...]], PipelineRunner]:
        """What is compiled, by pipeline and devices of the optimizer layout: strategies have pipelines in common."""
        return {}

    def _mesh(self, placement: Candidates) -> Mesh:
        return flat_mesh([self.devices[number] for number in placement.devices])

    @cached_property
    def _is_flat(self) -> TrainState:
        """Which leaves of the state have a parameter's shape."""
        shapes = self.shapes
        params = jax.tree.map(lambda x: True, shapes.params)
        return TrainState(params, mirrors(shapes.opt_state, shapes.params), False, False, False)
