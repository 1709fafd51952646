"""Move the bytes of a plan between live arrays."""

from dynajax.engine.compiled import Compiled as Compiled
from dynajax.engine.report import Report as Report
from dynajax.engine.reshard import plan_reshard as plan_reshard
from dynajax.engine.reshard import prepare_reshard as prepare_reshard
from dynajax.engine.reshard import reshard as reshard
from dynajax.engine.stored import Bundle as Bundle
from dynajax.engine.stored import Stored as Stored
