"""One step under any strategy: orders, ring attention, pipelines, storage, and how they compose."""

from dynajax.runtime.attention import ring_attention as ring_attention
from dynajax.runtime.order import TokenOrder as TokenOrder
from dynajax.runtime.order import contiguous as contiguous
from dynajax.runtime.order import zigzag as zigzag
from dynajax.runtime.pipeline import pipeline_blocks as pipeline_blocks
from dynajax.runtime.timetable import Timetable as Timetable
from dynajax.runtime.timetable import layer_order as layer_order
