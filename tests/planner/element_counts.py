"""The least bytes of a move, counted element by element."""

import numpy as np
from planner.random_layouts import held


def counted(source, target, node):
    """``(sent, between nodes)`` in bytes, element by element: a node makes one sum of all parts and shares it."""
    sent = between = 0
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        has = {d: held(before, d) for d in before.devices.tolist()}
        wants = {d: held(after, d) for d in after.devices.tolist()}
        for n in np.unique(node):
            inside = [d for d in wants if node[d] == n]
            needed = np.sum([wants[d] for d in inside], axis=0) if inside else np.zeros(before.shape, int)
            holders = np.sum([h.astype(int) for h in has.values()], axis=0) if has else np.zeros(before.shape, int)
            near = np.sum(
                [h.astype(int) for d, h in has.items() if node[d] == n] or [np.zeros(before.shape, int)], axis=0
            )
            both = np.any([wants[d] & has[d] for d in inside if d in has] or [np.zeros(before.shape, bool)], axis=0)
            some = needed > 0
            if before.partial:
                sent += int((holders - both + needed - 1)[some].sum()) * tensor.itemsize
                between += int((holders - near)[some].sum()) * tensor.itemsize
            else:
                sent += (
                    sum(int((wants[d] & ~has.get(d, np.zeros_like(wants[d]))).sum()) for d in inside) * tensor.itemsize
                )
                between += int((some & (near == 0)).sum()) * tensor.itemsize
    return sent, between
