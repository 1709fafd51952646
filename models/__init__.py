"""Flax models whose every parameter names its logical axes.

A model is a config (its shape), a nested dict of arrays (its parameters) and an ``Execution`` (how a
call runs). ``init`` and ``forward`` are pure functions of these; ``Llama`` is the same as an NNX module.
"""

from dynajax.models.attention import attention_mask as attention_mask
from dynajax.models.attention import packed_attention as packed_attention
from dynajax.models.config import LlamaConfig as LlamaConfig
from dynajax.models.config import MoeConfig as MoeConfig
from dynajax.models.execution import Attention as Attention
from dynajax.models.execution import Constrain as Constrain
from dynajax.models.execution import Execution as Execution
from dynajax.models.execution import unconstrained as unconstrained
from dynajax.models.experts import Arithmetic as Arithmetic
from dynajax.models.experts import Choices as Choices
from dynajax.models.experts import ExpertKernels as ExpertKernels
from dynajax.models.experts import Experts as Experts
from dynajax.models.experts import sorted_experts as sorted_experts
from dynajax.models.functional import ParameterSpec as ParameterSpec
from dynajax.models.functional import Params as Params
from dynajax.models.functional import count_parameters as count_parameters
from dynajax.models.functional import embed as embed
from dynajax.models.functional import forward as forward
from dynajax.models.functional import forward_with_stats as forward_with_stats
from dynajax.models.functional import init as init
from dynajax.models.functional import merge as merge
from dynajax.models.functional import parameter_specs as parameter_specs
from dynajax.models.functional import project as project
from dynajax.models.functional import run_blocks as run_blocks
from dynajax.models.functional import split as split
from dynajax.models.llama import Llama as Llama
from dynajax.models.loss import mean_loss as mean_loss
from dynajax.models.loss import token_loss as token_loss
from dynajax.models.moe import RouterStats as RouterStats
from dynajax.models.moe import balance_loss as balance_loss
from dynajax.models.moe import router_loss as router_loss
from dynajax.models.moe import z_loss as z_loss
from dynajax.models.presets import preset as preset
from dynajax.models.presets import preset_names as preset_names
