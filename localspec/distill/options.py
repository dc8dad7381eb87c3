"""How a drafter is trained."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.errors import OptionError

OBJECTIVES = {"ce": 0.0, "kl": 1.0, "mix": 0.5}  # the share of the target's own distribution, the rest is its choice
POSITION_WEIGHTS = ("drawn", "exponential", "d-pace")


@dataclass(frozen=True)
class Options:
    """How to train; sizes of one step are windows x anchors."""

    hours: float | None = None
    steps: int | None = None
    init: str | None = None  # the folder of another run whose best weights this one begins with
    n_windows: int = 8
    n_anchors: int = 64
    n_context: int = 512
    repeat_weight: float = 1.0  # how often anchors in repeating text are drawn, fresh ones being 1
    objective: str = "ce"  # on the token that was said, "kl" to the target's distribution, or a "mix" of both
    position_weights: str = "drawn"  # or "exponential", which weighs every slot instead, or "d-pace"
    gamma: float = 4.0  # of the first two: slots until a weight, or share, has fallen to 1/e
    alpha: float = 0.5  # of "d-pace"
    selector_weight: float = 1.0  # 0: no pair scores, a candidate's score is its logit
    lr: float = 1e-3
    warmup: float = 0.04
    final_lr: float = 0.1
    clip: float = 1.0
    eval_batches: int = 8
    eval_every_s: float = 300.0
    patience: int = 12  # evaluations without a better acceptance length on fresh text before training stops; 0: never
    log_every: int = 20
    checkpoint_every_s: float = 300.0
    compile: bool = True
    n_threads: int | None = None  # default: torch's choice
    device: str | None = None  # default: CUDA where there is one, else the CPU
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.steps is None):
            raise OptionError("Training needs exactly one budget: hours or steps.")
        for name, known in (("objective", tuple(OBJECTIVES)), ("position_weights", POSITION_WEIGHTS)):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}.")
        if self.repeat_weight < 0:
            raise OptionError(f"repeat_weight must be 0 or more, not {self.repeat_weight}.")
