"""Strategies, and the clusters that they run on."""

from dynajax.meshes.placement import Placement as Placement
from dynajax.meshes.placement import read_devices as read_devices
from dynajax.meshes.rules import ACTIVATION_RULES as ACTIVATION_RULES
from dynajax.meshes.rules import PARAMETER_RULES as PARAMETER_RULES
from dynajax.meshes.rules import Rules as Rules
from dynajax.meshes.rules import spec as spec
from dynajax.meshes.strategy import AXES as AXES
from dynajax.meshes.strategy import Pipeline as Pipeline
from dynajax.meshes.strategy import Strategy as Strategy
from dynajax.meshes.topology import Tier as Tier
from dynajax.meshes.topology import Topology as Topology
from dynajax.meshes.topology import topology_names as topology_names
