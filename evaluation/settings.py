"""Options of an evaluation."""

from dataclasses import dataclass, field

from ..training.prompts import TASKS
from ..training.suggestions import check_choice

DEFAULT_TASKS = ("question_answering", "reconstruction", "continuation")


@dataclass(frozen=True)
class EvaluationSettings:
    """Options of an evaluation; the report holds them all.

    Args:
        tasks: what to ask of every data set whose columns allow it.
        ratios: compression ratios; the checkpoint's own when `None`.
        max_samples: samples per data set and task, drawn by the seed; all when `None`.
        batch_size: samples per batch.
        seed: draws samples, windows of text and generated documents.
        max_new_tokens: most tokens of an answer or summary, per task.
        context_tokens: length of the windows that reconstruction and continuation take from a text.
        continuation_tokens: length of what follows such a window in continuation.
        reconstruction_bleu: also write reconstructions greedily and score their BLEU.
        prompts: name or file of the prompts; "memory_tokens" for a compressor with task tokens, and the packaged ones
            for every other model, when `None`.
        context_prefix: text in front of the contexts of questions and summaries, such as a heading; part of them.
        zero_shot: also score the base language model, adapters off, with full context and without.
        truncate_context: cut contexts that do not fit into the model, and count them, instead of raising.
        allow_untrained_ratio: also compress at ratios that the checkpoint was not trained for.

    Raises:
        ValueError: a value that is not allowed.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    ratios: tuple[int, ...] | None = None
    max_samples: int | None = None
    batch_size: int = 8
    seed: int = 0
    max_new_tokens: dict[str, int] = field(default_factory=lambda: {"question_answering": 32, "summarisation": 128})
    context_tokens: int = 256
    continuation_tokens: int = 64
    reconstruction_bleu: bool = False
    prompts: str | None = None
    context_prefix: str = ""
    zero_shot: bool = False
    truncate_context: bool = False
    allow_untrained_ratio: bool = False

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_choice("task", task, TASKS)
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks must be one or more of {TASKS}, each once, got {self.tasks}")
        if self.ratios is not None and (
            not self.ratios or min(self.ratios) < 1 or len(set(self.ratios)) < len(self.ratios)
        ):
            raise ValueError(f"ratios must be one or more different numbers of at least 1, got {self.ratios}")
        for task in ("question_answering", "summarisation"):
            if self.max_new_tokens.get(task, 0) < 1:
                raise ValueError(f"max_new_tokens must be at least 1 for {task}, got {self.max_new_tokens}")
        for name in ("batch_size", "context_tokens", "continuation_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples must be at least 1, got {self.max_samples}")
