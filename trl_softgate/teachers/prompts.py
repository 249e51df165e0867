"""A teacher that sees another prompt than the student: its own chat template, a hint, the reference solution."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .base import Teacher, TeacherRequest, forward_traits, start

Row = Mapping[str, Any]


class PromptedTeacher:
    """Asks `teacher` with another prompt for each row; the completion's ids stay the student's.

    Args:
        teacher: who is asked.
        prompt: row of the dataset -> prompt, as a string or as messages; or the name of the column that holds it.
        tokenizer: the teacher's. Messages go through its chat template, with the generation prompt; a string is
            tokenized as it is, with the tokenizer's special tokens. Either way a BOS token is written once.
        chat_template_kwargs: further variables of the chat template.
    """

    def __init__(
        self,
        teacher: Teacher,
        prompt: str | Callable[[Row], Any],
        tokenizer: Any,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.teacher = teacher
        forward_traits(teacher, self)
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        if len(request.inputs) != len(request.completion_ids):
            raise ValueError(
                f"The teacher's prompts come from the rows of the dataset; `request.inputs` has {len(request.inputs)} "
                f"for {len(request.completion_ids)} completions."
            )
        ids = [self.token_ids(row) for row in request.inputs]
        longest = max(map(len, ids), default=1)
        device = request.prompt_ids.device
        return start(
            self.teacher,
            replace(
                request,
                prompt_ids=_padded(ids, longest, device),
                prompt_mask=_padded([[1] * len(row) for row in ids], longest, device),
            ),
        )

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        return self.start(request)()

    def token_ids(self, row: Row) -> list[int]:
        """The teacher's prompt for one row of the dataset.

        Raises:
            ValueError: there is no such column, the prompt is empty, or it is neither a string nor messages.
        """
        if isinstance(self._prompt, str):
            if self._prompt not in row:
                raise ValueError(
                    f"The dataset has no column {self._prompt!r} with the teacher's prompt; it has {sorted(row)}."
                )
            prompt = row[self._prompt]
        else:
            prompt = self._prompt(row)
        if isinstance(prompt, str):
            ids = self._tokenizer(text=prompt)["input_ids"]
            bos = self._tokenizer.bos_token_id
            if bos is not None and list(ids[:2]) == [bos, bos]:
                # a text that was rendered by a chat template has its own
                ids = ids[1:]
        elif isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
            # tokenized within the template: rendered to text first, the tokenizer would add a second BOS
            ids = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **self._chat_template_kwargs
            )
        elif prompt == []:
            ids = []
        else:
            raise ValueError(
                f"The teacher's prompt must be a string or a list of messages, got {prompt!r}. A row without teacher "
                "is one that `teacher_column` leaves empty."
            )
        if len(ids) == 0:
            raise ValueError("The teacher's prompt is empty: give it at least one token.")
        return list(ids)


def _padded(rows: list[list[int]], length: int, device: torch.device) -> torch.Tensor:
    """(B, length), zeros on the left; also of no rows."""
    padded = [[0] * (length - len(row)) + row for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), length)
