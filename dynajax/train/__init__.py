"""The training loop: state, step, switches, checkpoints and records."""

from dynajax.train.job import StepOptions as StepOptions
from dynajax.train.prepare import Preparation as Preparation
from dynajax.train.record import StepReport as StepReport
from dynajax.train.record import SwitchReport as SwitchReport
from dynajax.train.state import TrainState as TrainState
from dynajax.train.trainer import Trainer as Trainer
