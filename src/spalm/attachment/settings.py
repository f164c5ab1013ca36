"""Settings of attaching a memory to a pretrained model."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from spalm.attachment.gate import GateTraining
from spalm.attachment.policy import PolicySettings
from spalm.semiparametric import AdaptiveSettings, GateSettings, KnnSettings
from spalm.settings import Settings


class AttachSettings(Settings):
    """How a memory is attached to a pretrained model."""

    context: int = Field(default=1024, gt=1)
    """Tokens that the model reads at once, at most as many as it can."""
    stride: int = Field(default=768, gt=0)
    """New tokens in each further window of a long document; the rest is left context."""
    dev_share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the text on which the combiner is calibrated; whole documents."""
    test_share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of the text on which it is measured; whole documents."""
    document_start: str | None = None
    """Regular expression for a line that begins a new document in a file, its first group the name."""
    neighbours: int = Field(default=512, gt=0)
    """Neighbours that are searched for."""
    positions: int = Field(default=24_000, gt=0)
    """Training positions that the mixture learns from."""
    held_out: int = Field(default=20_000, gt=0)
    """Positions of dev that it is calibrated on, and of test that it is measured on, at most."""
    search: float = Field(default=1.0, gt=0, le=1)
    """Share of the positions that are searched, those for which it pays most."""
    combiner: Literal["adaptive", "knn-lm", "gate"] = "adaptive"
    """What brings the memory in. The paper's gate is only trained if it is request for here."""
    knn: KnnSettings = KnnSettings()
    """On what grid kNN-LM is tuned."""
    adaptive: AdaptiveSettings = AdaptiveSettings(neighbours=512, batch_size=512, passes=8)
    """The mixture."""
    gate: GateSettings = GateSettings(neighbours=16, distance_bias=True, project_memory=True)
    """The paper's gate."""
    gate_training: GateTraining = GateTraining()
    """How long it is trained."""
    policy: PolicySettings = PolicySettings()
    """What decides where to search."""
    cache: int = Field(default=2000, gt=0)
    """Positions back that the continuous cache, a dynamic mode, looks at."""
    seed: int = Field(default=1, ge=0)
    """Seed of the random samples."""

    @field_validator("stride")
    @classmethod
    def _within_the_context(cls, stride: int, info: ValidationInfo) -> int:
        if stride > info.data.get("context", stride):
            raise ValueError(f"a window has {info.data['context']} tokens (context); give at most that")
        return stride
