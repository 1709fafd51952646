"""How to get from one layout to another: who sends what to whom, when, and at what price (pure)."""

from dynajax.planner.build import build_plan as build_plan
from dynajax.planner.cost.price import Price as Price
from dynajax.planner.cost.price import price_plan as price_plan
from dynajax.planner.cost.price import worth_it as worth_it
from dynajax.planner.plan import Move as Move
from dynajax.planner.plan import Plan as Plan
from dynajax.planner.ranks.assign import assign_ranks as assign_ranks
from dynajax.planner.ranks.assign import coupled_ranks as coupled_ranks
from dynajax.planner.ranks.assign import renumbered as renumbered
from dynajax.planner.route import Copies as Copies
from dynajax.planner.route import Route as Route
from dynajax.planner.stages.footprint import Granularity as Granularity
from dynajax.planner.verification.verify import verify as verify
