"""One step under any strategy: orders, ring attention, pipelines, storage, and how they compose."""

from dynajax.runtime.attention import AttentionTiles as AttentionTiles
from dynajax.runtime.attention import ring_attention as ring_attention
from dynajax.runtime.experts import exchange_experts as exchange_experts
from dynajax.runtime.order import TokenOrder as TokenOrder
from dynajax.runtime.order import contiguous as contiguous
from dynajax.runtime.order import zigzag as zigzag
from dynajax.runtime.rules import ExpertAxes as ExpertAxes
from dynajax.runtime.rules import activation_rules as activation_rules
from dynajax.runtime.rules import expert_axes as expert_axes
from dynajax.runtime.rules import expert_rules as expert_rules
from dynajax.runtime.rules import parameter_storage as parameter_storage
from dynajax.runtime.rules import refined as refined
from dynajax.runtime.rules import replicated_axes as replicated_axes
from dynajax.runtime.rules import storage_rules as storage_rules
from dynajax.runtime.sharded_loss import loss_and_metrics as loss_and_metrics
from dynajax.runtime.sharded_model import ShardedModel as ShardedModel
from dynajax.runtime.spmd_pipeline import pipeline_blocks as pipeline_blocks
from dynajax.runtime.storage import Cut as Cut
from dynajax.runtime.storage import CutLayers as CutLayers
from dynajax.runtime.storage import DimStorage as DimStorage
from dynajax.runtime.storage import Piece as Piece
from dynajax.runtime.storage import Storage as Storage
from dynajax.runtime.storage import StorageRules as StorageRules
from dynajax.runtime.storage import storage_of as storage_of
from dynajax.runtime.timetable import Timetable as Timetable
from dynajax.runtime.timetable import layer_order as layer_order
