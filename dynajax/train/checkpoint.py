"""Checkpoints of a run: written under any placement, read under any other.

Orbax stores one array for each leaf, the whole tensor without padding, named by the leaf's path. The tree
itself is not stored: it is made again from the model and the optimizer, so containers keep their types, and
a leaf that is missing or too many is named before anything is read. Keys are stored as their data, empty
leaves not at all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dynajax.arrays.dtypes import is_key
from dynajax.data import Cursor, Stream
from dynajax.errors import RunError
from dynajax.train.job import Job, JobPlacement
from dynajax.train.state import TrainState, abstract_arrays


def latest_step(folder: Path) -> int | None:
    """Step of the latest whole checkpoint in ``folder``, None if there is none; reads names only."""
    # Orbax writes under another name and renames the folder when it is whole.
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=None)


class Checkpoints:
    """The checkpoints in one folder, by step; a context manager.

    Args:
        folder: made if it is not there.
        keep: how many to keep, the latest ones.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, state: TrainState, job: Job[Any], placement: JobPlacement, data: Stream) -> None:
        """Write ``state``, which lies as ``job.layout(placement)`` says, once for each step."""
        step, sample = int(state.step), int(state.cursor)
        if step in self._manager.all_steps():
            return
        state = job.to_plain(state, placement)
        stored = {name: _as_data(leaf) for name, leaf in _leaves(state).items() if leaf.size}
        about = {
            "cursor": dataclasses.asdict(dataclasses.replace(data.start(), step=step, sample=sample)),
            "strategy": str(placement),
            "leaves": _described(state),
            "keys": {name: str(jax.random.key_impl(leaf)) for name, leaf in _leaves(state).items() if is_key(leaf)},
        }
        items = ocp.args.Composite(state=ocp.args.StandardSave(stored), about=ocp.args.JsonSave(about))
        self._manager.save(step, args=items)

    def restore(self, job: Job[Any], placement: JobPlacement, data: Stream) -> TrainState:
        """The latest state, laid out for ``placement``.

        Raises:
            RunError: there is none, or its leaves are not those of ``job``.
            DataError: it was trained on other documents, or in another order.
        """
        step = self._manager.latest_step()
        if step is None:
            raise RunError("there is no checkpoint to resume from; start a run with --out and without --resume")
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        data.resume(Cursor(**about["cursor"]))
        target = abstract_arrays(job.shapes, job.plain_layout(placement))
        _require_same(about["leaves"], _described(target))
        wanted = {name: _data_of(leaf) for name, leaf in _leaves(target).items() if leaf.size}
        read = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
        leaves = [_leaf(read.get(name), leaf, about["keys"].get(name)) for name, leaf in _leaves(target).items()]
        return job.from_plain(jax.tree.unflatten(jax.tree.structure(target), leaves), placement)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()


def _leaves(state: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _described(state: Any) -> dict[str, str]:
    """Type and shape of each leaf, such as ``float32[8,16]`` or ``key<fry>[]``."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in _leaves(state).items()}


def _require_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise RunError(
                f"the checkpoint has {saved.get(name, 'nothing')} at {name} and this run needs "
                f"{wanted.get(name, 'nothing')}; give the same model and optimizer, or start anew"
            )


def _as_data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _data_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What ``_as_data`` makes of such a leaf; every key of the state is whole on each device."""
    if not is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _leaf(data: jax.Array | None, wanted: jax.ShapeDtypeStruct, key_impl: str | None) -> jax.Array:
    if data is None:
        return jax.device_put(jnp.zeros(wanted.shape, wanted.dtype), wanted.sharding)
    return data if key_impl is None else jax.random.wrap_key_data(data, impl=key_impl)
