"""dynajax: change the parallelism of a running Flax/Optax training job.

One space of named tensors, layouts over it, and one verb: move from a layout to another.
Import the names below; everything else is found in the package named after it.
"""

from dynajax.engine import Report as Report
from dynajax.engine import plan_reshard as plan_reshard
from dynajax.engine import reshard as reshard
from dynajax.errors import DynajaxError as DynajaxError
from dynajax.meshes import Strategy as Strategy
from dynajax.train.trainer import Trainer as Trainer

__version__ = "0.1.0"
