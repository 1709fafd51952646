"""The rules of a strategy: how it cuts parameters and activations, and what it keeps whole.

Mesh axes and what they cut:

- tp: heads, kv_heads, mlp, vocab.   pp: layers; and vocab, after tp, so that the tables of the first and the
  last stage weigh on all stages alike.   fsdp: embed, gathered before use.   ep: experts.
- dp, fsdp, ep: rows of a batch.   cp: its tokens.

Where kv_heads are fewer than tp, key and value projections are whole on each rank of tp, which computes
them all and attends with those that its query heads need. This is replication on purpose: it is declared
in the rule, and the gradients are those of one tensor, summed once.

Experts may have a layout of their own, ``/epN.tpM``: N and M are then products of mesh axes other than
pp, and the experts are cut over these axes whatever the axes mean to the rest of the model. Where they need
a part of dp, ``refined`` makes an axis of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

from dynajax.errors import StrategyError
from dynajax.meshes import ACTIVATION_RULES, AXES, Rules, Strategy, spec
from dynajax.models import LlamaConfig, ParameterSpec
from dynajax.runtime.storage import Cut, CutLayers, Storage, StorageRules, storage_of

BATCH_AXES = ACTIVATION_RULES["batch"]
"""Mesh axes that cut the rows of a batch."""

ROWS = spec(("batch", "seq"), ACTIVATION_RULES)
"""How the leaves of a batch are cut."""


@dataclass(frozen=True)
class ExpertAxes:
    """Mesh axes that cut the experts of a mixture.

    Attributes:
        expert: cut the number of experts.
        mlp: cut the width of each expert.
    """

    expert: tuple[str, ...]
    mlp: tuple[str, ...]


def expert_axes(strategy: Strategy) -> ExpertAxes:
    """Which mesh axes cut the experts: ep and tp, or those that the part after a slash is folded over.

    Of several ways to fold, the width of an expert goes over the fastest axes that fit, then the experts do.

    Raises:
        StrategyError: a size after the slash is no product of whole mesh axes.
    """
    pipeline = strategy.pipelines[0]
    if pipeline.experts is None:
        return ExpertAxes(("ep",), ("tp",))
    used = [a for a in reversed(AXES) if a != "pp" and pipeline.size(a) > 1]
    subsets = list(chain.from_iterable(combinations(used, n) for n in range(len(used) + 1)))
    expert, mlp = pipeline.experts
    for inner in subsets:
        for outer in subsets:
            sizes = [math.prod(pipeline.size(a) for a in axes) for axes in (outer, inner)]
            if sizes == [expert, mlp] and not set(inner) & set(outer):
                return ExpertAxes(outer[::-1], inner[::-1])
    raise StrategyError(
        f"{strategy}: ep{expert}.tp{mlp} after the slash cannot be made of the axes before it; "
        f"take products of different axes out of {', '.join(f'{a}{pipeline.size(a)}' for a in used) or 'dp1'}"
    )


def refined(strategy: Strategy) -> Strategy:
    """The same strategy with dp cut in two where its experts' layout needs a part of it.

    ep carries rows like dp outside the experts, and comes next to it in the mesh: dp4.tp4/ep8 is dp2.ep2.tp4/ep8, whose
    experts lie over all of ep and tp. The text stays as it was written.

    Raises:
        StrategyError: no cut of dp makes the experts' layout either.
    """
    try:
        expert_axes(strategy)
    except StrategyError:
        for cut in _with_part_of_dp_as_ep(strategy):
            try:
                expert_axes(cut)
            except StrategyError:
                continue
            return cut
        raise
    return strategy


def _with_part_of_dp_as_ep(strategy: Strategy) -> Iterator[Strategy]:
    (pipeline,) = strategy.pipelines if strategy.is_homogeneous else (None,)
    if pipeline is None or pipeline.size("ep") > 1:
        return
    dp = pipeline.size("dp")
    for ep in range(2, dp):
        if dp % ep == 0:
            changed = {"dp": dp // ep, "ep": ep}
            sizes = tuple(changed.get(axis, size) for axis, size in zip(AXES, pipeline.sizes, strict=True))
            yield Strategy((replace(pipeline, sizes=sizes),))


def storage_rules(config: LlamaConfig, strategy: Strategy, chunks: int = 1) -> StorageRules:
    """How parameters without an expert dim are stored, by logical axis."""
    tp = strategy.size("tp")
    few = ""
    if config.kv_heads < tp:
        few = f"{config.kv_heads} kv_heads are fewer than tp = {tp}, and each rank of tp computes them all"
    return {
        "layers": CutLayers("pp", chunks),
        "vocab": Cut(("tp", "pp")),
        "heads": Cut(("tp",), granule=1 if few else config.group),
        "kv_heads": Cut(replicated_because=few) if few else Cut(("tp",)),
        "mlp": Cut(("tp",)),
        "embed": Cut(("fsdp",), gathered=True),
        "head_dim": Cut(),
    }


def expert_rules(config: LlamaConfig, strategy: Strategy, chunks: int = 1) -> StorageRules:
    """How parameters with an expert dim are stored: embed takes what axes the experts leave."""
    axes = expert_axes(strategy)
    left = tuple(a for a in ("fsdp",) if a not in (*axes.expert, *axes.mlp))
    ours = {"expert": Cut(axes.expert), "mlp": Cut(axes.mlp), "embed": Cut(left, gathered=True)}
    return {**storage_rules(config, strategy, chunks), **ours}


def parameter_storage(parameter: ParameterSpec, config: LlamaConfig, strategy: Strategy, chunks: int = 1) -> Storage:
    """How one parameter of ``config`` is stored under ``strategy``, with ``chunks`` runs of layers a stage.

    Raises:
        StrategyError: the experts' layout cannot be made of the strategy's axes.
    """
    rules = expert_rules if "expert" in parameter.axes else storage_rules
    return storage_of(parameter.shape, parameter.axes, rules(config, strategy, chunks), strategy.mesh_shape())


def replicated_axes(config: LlamaConfig, strategy: Strategy) -> dict[str, str]:
    """Logical axes that a strategy keeps whole though one of its axes is there to cut them, and why."""
    rules = storage_rules(config, strategy)
    return {name: rule.replicated_because for name, rule in rules.items() if rule.replicated_because}


def activation_rules(config: LlamaConfig, strategy: Strategy) -> Rules:
    """How activations are cut; each dim that an axis cuts has its stored size, which the axis divides."""
    kv_heads = () if "kv_heads" in replicated_axes(config, strategy) else ("tp",)
    return {**ACTIVATION_RULES, "vocab": ("tp", "pp"), "kv_heads": kv_heads}
