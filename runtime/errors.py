"""Every error that a user can see. One root, so that the command line prints one line.

TrtllmLiteError              exit code 1
├── UsageError               exit code 2: an option or an argument that cannot be honoured
├── BundleError              a bundle that is missing, damaged, foreign or unsafe
├── CheckpointError          a checkpoint that cannot be read
├── UnsupportedError         something the checkpoint needs and we do not do
├── MissingExtraError        an optional package is not installed
├── VerificationError        the parity gates failed
├── RequestError             a request that can never be served (also a ValueError)
│   └── ContextLengthError   its tokens exceed what the engine holds
├── BusyError                no capacity for it now; the same request may be served later
├── StepError                an engine step failed; only its own requests end
└── EngineDeadError          the engine is closed or its thread has died
"""


class TrtllmLiteError(Exception):
    """Root of all errors raised on purpose. `str(error)` is one line, meant for the user."""

    exit_code = 1


class UsageError(TrtllmLiteError):
    """An option or argument that cannot be honoured."""

    exit_code = 2


class BundleError(TrtllmLiteError):
    """A bundle that is missing, damaged, foreign or unsafe. `field` names the culprit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CheckpointError(TrtllmLiteError):
    """A checkpoint that cannot be read."""


class UnsupportedError(TrtllmLiteError):
    """The checkpoint needs something we do not do: what, what is supported, what to do."""

    def __init__(self, needs: str, supported: str, action: str) -> None:
        super().__init__(f"the checkpoint needs {needs}; supported: {supported}; {action}")
        self.needs = needs


class MissingExtraError(TrtllmLiteError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'trtllm-lite[{extra}]'")


class VerificationError(TrtllmLiteError):
    """A parity gate failed."""


class RequestError(TrtllmLiteError, ValueError):
    """A request that can never be served. `param` is the offending field, as users know it."""

    exit_code = 2

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class ContextLengthError(RequestError):
    """The request's tokens exceed what the engine holds."""


class BusyError(TrtllmLiteError):
    """There is no capacity for a request now. Nothing is wrong with it: try again later."""


class StepError(TrtllmLiteError):
    """An engine step failed. Only the requests of that step end."""


class RunInterruptedError(StepError):
    """A run was given up while it was going, because it had become useless."""


class EngineDeadError(TrtllmLiteError):
    """The engine is closed, or its thread has died."""
