"""The virtual parameter space: what state there is, and who holds which part of it (pure)."""

from dynajax.vps.flat import flat_layout as flat_layout
from dynajax.vps.parts import Block as Block
from dynajax.vps.parts import Part as Part
from dynajax.vps.parts import Run as Run
from dynajax.vps.parts import bucket_parts as bucket_parts
from dynajax.vps.parts import fused_parts as fused_parts
from dynajax.vps.parts import layer_part as layer_part
from dynajax.vps.parts import slice_part as slice_part
from dynajax.vps.region import Region as Region
from dynajax.vps.region import blocks as blocks
from dynajax.vps.region import box as box
from dynajax.vps.region import interval as interval
from dynajax.vps.space import Space as Space
from dynajax.vps.space import Tensor as Tensor
from dynajax.vps.spec import mesh_tiling as mesh_tiling
from dynajax.vps.spec import named_tiling as named_tiling
from dynajax.vps.spec import strategy_layout as strategy_layout
from dynajax.vps.stored import Pieces as Pieces
from dynajax.vps.stored import stored_tiling as stored_tiling
from dynajax.vps.tiling import Arrays as Arrays
from dynajax.vps.tiling import Layout as Layout
from dynajax.vps.tiling import Tiling as Tiling
from dynajax.vps.zero1 import zero1_layout as zero1_layout
