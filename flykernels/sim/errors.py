"""What can go wrong before or while a kernel is simulated, apart from what the checker finds."""


class SimulatorError(ValueError):
    """Base of all simulator errors: what was asked, what is wrong, what to do."""


class UnknownInstruction(SimulatorError):
    """An instruction, operand or modifier that the simulator does not know. Never skipped: its result would be
    wrong."""


class BadCodeObject(SimulatorError):
    """Bytes or text that are not a gfx950 code object: truncated, foreign, or of another architecture."""


class BadArguments(SimulatorError):
    """A kernel name, an argument count or an argument size that does not fit the code object."""


class BudgetExceeded(SimulatorError):
    """More instructions than allowed: an endless loop, or a launch too large for the budget given."""


class Trapped(SimulatorError):
    """The kernel executed s_trap: an assertion of its own failed."""


class FindingsError(AssertionError):
    """Raised by `SimResult.raise_for_findings`: the kernel ran, and the checker found errors."""
