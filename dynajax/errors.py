"""What dynajax raises. Every message says what was got, where, and what to change."""


class DynajaxError(ValueError):
    """Base of every error that a caller can mend; the command line prints it in one line and exits with 2."""


class StrategyError(DynajaxError):
    """A strategy cannot be read, or does not fit the devices or the model."""


class LayoutError(DynajaxError):
    """A layout does not describe the tensors of its space exactly once."""


class TargetError(DynajaxError):
    """The target tree of a move has missing, extra or incompatible leaves."""


class ModelError(DynajaxError):
    """A model is unknown, or its shape is impossible."""


class BudgetError(DynajaxError):
    """The memory budget cannot hold the smallest possible stage of a move."""


class CheckError(DynajaxError):
    """Bytes that should agree do not: unequal replicas, or a region that changed on its way."""


class DataError(DynajaxError):
    """A data source cannot be read or holds nothing to train on."""


class BalanceError(DynajaxError):
    """A batch cannot be planned: a sequence that nothing holds, or a profile, candidate or limit that does not fit."""


class SwitchError(DynajaxError):
    """A change of strategy could not be prepared or carried out; the message says what is left of the old state."""


class DeadlineError(DynajaxError):
    """Something did not finish in the time given; the message names it."""


class RunError(DynajaxError):
    """A run cannot start or go on as asked: its steps, its switches or its folder."""


class TopologyError(DynajaxError):
    """A topology cannot be read, or lacks devices or links that a plan needs."""


class AgreementError(DynajaxError):
    """Processes that should do the same are about to do different things."""
