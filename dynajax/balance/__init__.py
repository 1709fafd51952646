"""Which strategy and which sequences go where: costs, candidates, dispatch and packing (pure planning).

    lengths → candidates (``propose``) → for each batch: dispatch → packs → the plan of an iteration

``Planner.plan`` is the way through; the other names are its parts, and the baselines that they are
compared with. ``dynajax.train.plan_ahead`` runs it in the background of a training job.
"""

from dynajax.balance.baselines import Homogeneous as Homogeneous
from dynajax.balance.bound import any_strategy_ms as any_strategy_ms
from dynajax.balance.cost import MemoryModel as MemoryModel
from dynajax.balance.cost import PipelineCost as PipelineCost
from dynajax.balance.cost import Profile as Profile
from dynajax.balance.cost import Timing as Timing
from dynajax.balance.cost import costs_of as costs_of
from dynajax.balance.cost import data_parallel as data_parallel
from dynajax.balance.cost import pipelines_of as pipelines_of
from dynajax.balance.cost import short_text as short_text
from dynajax.balance.cost_fit import CostFit as CostFit
from dynajax.balance.cost_fit import Point as Point
from dynajax.balance.cost_fit import fit_cost as fit_cost
from dynajax.balance.cost_fit import measure_profile as measure_profile
from dynajax.balance.dispatch import Dispatch as Dispatch
from dynajax.balance.dispatch import dispatch as dispatch
from dynajax.balance.iteration import IterationOptions as IterationOptions
from dynajax.balance.iteration import IterationPlan as IterationPlan
from dynajax.balance.iteration import Planner as Planner
from dynajax.balance.lengths import LengthBatches as LengthBatches
from dynajax.balance.lengths import Lengths as Lengths
from dynajax.balance.lengths import read_lengths as read_lengths
from dynajax.balance.microbatching import MicroBatch as MicroBatch
from dynajax.balance.microbatching import MicrobatchOptions as MicrobatchOptions
from dynajax.balance.microbatching import Packing as Packing
from dynajax.balance.microbatching import PipelinePlan as PipelinePlan
from dynajax.balance.microbatching import form_microbatches as form_microbatches
from dynajax.balance.profiles import load_profile as load_profile
from dynajax.balance.profiles import published_candidates as published_candidates
from dynajax.balance.profiles import save_profile as save_profile
from dynajax.balance.propose import Proposal as Proposal
from dynajax.balance.propose import enough_samples as enough_samples
from dynajax.balance.propose import propose as propose
from dynajax.balance.shapes import Shapes as Shapes
from dynajax.balance.simulate import published_ms as published_ms
from dynajax.balance.simulate import simulated_ms as simulated_ms
