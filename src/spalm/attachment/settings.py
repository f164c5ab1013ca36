"""Settings of attaching a memory to a pretrained model."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from spalm.attachment.fitting.gate_training import GateTrainingSettings
from spalm.attachment.search_policy import PolicySettings
from spalm.semiparametric import AdaptiveSettings, GateSettings, KnnSettings
from spalm.settings import Seed, Settings


class AttachSettings(Settings):
    """How a memory is attached to a pretrained model."""

    context: int = Field(default=1024, gt=1)
    """Number of tokens that the model reads at once, at most as many as it can."""
    stride: int = Field(default=768, gt=0)
    """Number of new tokens in each further window of a long document; the rest of the window is left context."""
    dev_share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the documents on which the combiner is calibrated."""
    test_share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the documents on which the combiner is measured."""
    document_start: str | None = None
    """Regular expression for a line that begins a new document in a file, its first group the name."""
    memory: Literal["auto", "both", "exact"] = "auto"
    """Sources of the memory: nearest contexts and exact matches, or exact matches alone, which need no keys. auto:
    both, with keys for as many positions as the model reads in a few minutes."""
    keys: int | None = Field(default=None, gt=0)
    """Highest number of positions that get keys, with whole documents: training documents most like the text `like`, or
    without it the last ones; if all have keys, documents of the library most like `like` or like the training text.
    Default: all training positions, unless `memory` is auto."""
    like: str | None = None
    """File of text. The documents most like it get keys."""
    library: list[str] = []
    """Files and folders of more text for exact matches, of which nothing is held out. See `keys` for its keys."""
    neighbours: int = Field(default=256, gt=0)
    """Number of neighbours that are searched for. More lower the perplexity a little and make generation slower."""
    positions: int = Field(default=24_000, gt=0)
    """Number of training positions that the mixture learns from."""
    own_text: int = Field(default=0, ge=0)
    """Number of tokens that the model writes by itself, for the mixture to learn where the memory has no part (try
    12,288); 0: none."""
    held_out: int = Field(default=20_000, gt=0)
    """Highest number of dev positions for calibration, and of test positions for measuring."""
    search: float = Field(default=1.0, gt=0, le=1)
    """Share of the positions that are searched: those where a search is expected to gain most."""
    combiner: Literal["adaptive", "knn-lm", "gate"] = "adaptive"
    """The combiner that is used. The paper's gate is trained only if it is chosen here."""
    knn: KnnSettings = KnnSettings()
    """The grid on which kNN-LM is tuned."""
    adaptive: AdaptiveSettings = AdaptiveSettings(neighbours=256, batch_size=512, passes=8)
    """The adaptive mixture."""
    gate: GateSettings = GateSettings(neighbours=16, distance_bias=True, project_memory=True)
    """The paper's gate."""
    gate_training: GateTrainingSettings = GateTrainingSettings()
    """How the gate is trained."""
    policy: PolicySettings = PolicySettings()
    """The policy that decides where to search."""
    cache: int = Field(default=2000, gt=0)
    """Number of preceding positions that the continuous cache, a dynamic mode, searches."""
    seed: Seed = 1
    """Seed of the random samples."""

    @model_validator(mode="after")
    def _keys_belong_to_both(self) -> "AttachSettings":
        if self.memory == "exact" and (self.keys is not None or self.like is not None):
            raise ValueError("memory = exact makes no keys; leave out keys and like, or give memory = both")
        return self

    @field_validator("stride")
    @classmethod
    def _within_the_context(cls, stride: int, info: ValidationInfo) -> int:
        if stride > info.data.get("context", stride):
            raise ValueError(f"a window has {info.data['context']} tokens (context); give at most that")
        return stride
