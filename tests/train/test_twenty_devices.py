"""Three unlike pipelines on a number of devices that divides nothing, and documents whose lengths differ 64-fold."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from train.document_runs import alone, assert_alike, assert_least_is_moved, balancing, take, trainer, written
from train.small_runs import MODEL

LENGTHS = [n // 64 for n in (512, 1024, 128, 4096, 2048, 256, 8192, 1024)]
DEVICES = 20


def test_steps_on_twenty_devices_are_those_of_one():
    data = written(LENGTHS, token_budget=sum(LENGTHS), longest=max(LENGTHS))
    optimizer = optax.chain(
        optax.trace(decay=0.0), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    )
    kind: Any = {"model": MODEL, "optimizer": optimizer, "balancing": balancing(device_tokens=16)}
    running = trainer("tp8|pp2.tp4|tp4", data=data, devices=DEVICES, **kind)
    for wanted in alone(data, 3, optimizer, MODEL):
        step, report = take(running)
        assert_alike(step, wanted)
        assert [share.devices for share in report.pipelines] == [8, 8, 4]
        assert min(share.sequences for share in report.pipelines) > 0
        assert sum(share.tokens for share in report.pipelines) == sum(LENGTHS)
        assert_least_is_moved(running, report)
    optimizer_arrays = [x for x in jax.tree.leaves((running.state.params, running.state.opt_state)) if x.ndim]
    assert len(optimizer_arrays) == 4 * len(jax.tree.leaves(running.state.params))  # with gradient and two moments
    for array in optimizer_arrays:
        shards = {shard.device.id: np.asarray(shard.data).size for shard in array.addressable_shards}
        assert shards == dict.fromkeys(range(DEVICES), array.size // DEVICES)
