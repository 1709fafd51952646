"""Strategies, and the clusters that they run on."""

from dynajax.meshes.strategy import AXES as AXES
from dynajax.meshes.strategy import Pipeline as Pipeline
from dynajax.meshes.strategy import Strategy as Strategy
