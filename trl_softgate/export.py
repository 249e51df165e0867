"""A trained adapter as a model of its own, and what a model card says of the run."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .validation import require_choice

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

DTYPES = ("auto", "bfloat16", "float16", "float32")
_SETTINGS = "### Settings"
# Where a run is and what it writes: of no use to a reader of its card.
_PLACES = (
    *("output_dir", "run_name", "resume_from_checkpoint", "report_to", "disable_tqdm", "debug", "use_cpu"),
    *("logging_", "save_", "hub_", "push_", "dataloader_", "vllm_server_", "teacher_server_url", "teacher_server_api"),
)
# The method's own options are said also where they are the default.
_OWN = ("opd_", "grpo_coef", "policy_objective", "epsilon", "sapo_", "gate_", "aggregation")


class ExportError(ValueError):
    """A folder that cannot be exported; the message says why, in one sentence."""


def merge_adapter(adapter: Path, output: Path, *, base: str | None = None, dtype: str = "auto") -> Path:
    """Add a LoRA adapter to the weights of its base model, and save the sum as a model of its own.

    Of a QLoRA student the base is loaded unquantized: the sum in four bits would lose most of what was learnt. The
    tokenizer beside the adapter, or else that of the base, goes along, and so does the adapter's card.

    Args:
        adapter: folder that `save_model` wrote.
        output: folder for safetensors, tokenizer and card; new or empty.
        base: folder or hub name of the base model; default: where the adapter says that it is.
        dtype: of the weights: "auto" (the base's), "bfloat16", "float16" or "float32".

    Returns:
        `output`.

    Raises:
        ExportError: `adapter` is no folder of an adapter, its base is not there or stored quantized, or `output` holds
            something already.
    """
    require_choice("dtype", dtype, DTYPES)
    if not (adapter / "adapter_config.json").is_file():
        raise ExportError(f"{adapter} is no folder of an adapter: it has no adapter_config.json.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"{output} holds something already: name a new folder.")

    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    stated = PeftConfig.from_pretrained(str(adapter))
    base = base or stated.base_model_name_or_path
    if not base:
        raise ExportError(f"{adapter} does not say which model it belongs to: name it with --base.")
    try:
        config = AutoConfig.from_pretrained(base, revision=stated.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"The base model {base} of {adapter} is neither a folder here nor a model on the hub that can be reached: "
            "name it with --base."
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ExportError(f"The base model {base} is stored quantized: name an unquantized copy with --base.")
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, revision=stated.revision, config=config, dtype=dtype, trust_remote_code=False
    )
    model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    beside = any(adapter.glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(
        str(adapter) if beside else base, revision=None if beside else stated.revision
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if (adapter / "README.md").is_file():
        shutil.copy(adapter / "README.md", output / "README.md")
    return output


def settings(args: GRPOConfig) -> dict[str, Any]:
    """Options of a run by name: the method's own, and others that are not the default; no tokens, and of a folder that
    is named by its whole path the last part alone."""
    found = {}
    for option in dataclasses.fields(args):
        value = getattr(args, option.name)
        default = option.default
        if option.default_factory is not dataclasses.MISSING:
            default = option.default_factory()
        plain = isinstance(value, (str, int, float, bool, list, dict)) or value is None
        unused = option.name in getattr(args, "_UNUSED", ())
        if not option.init or not plain or unused or option.name.startswith(_PLACES) or option.name.endswith("_token"):
            continue
        if value != default or option.name.startswith(_OWN):
            value = getattr(value, "value", value)
            found[option.name] = Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
    return found


def complete_card(trainer: GRPOTrainer) -> None:
    """Add the settings of the run to the card that `create_model_card` wrote.

    Called on every process; the main one writes. A second call changes nothing.
    """
    import yaml

    path = Path(str(trainer.args.output_dir), "README.md")
    if not trainer.is_world_process_zero() or not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    if _SETTINGS in text:
        return
    args: Any = trainer.args
    listed = yaml.safe_dump(settings(args), sort_keys=False, allow_unicode=True)
    section = f"{_SETTINGS}\n\n```yaml\n{listed}```\n\n"
    before, mark, after = text.partition("### Framework versions")
    text = f"{before}{section}{mark}{after}"
    # a base model in a folder has no page of its own, and a model that is not on the hub no name there
    text = text.replace("a fine-tuned version of [None](https://huggingface.co/None)", "a fine-tuned model", 1)
    text = text.replace("Model Card for None", f"Model Card for {path.parent.name}", 1)
    text = text.replace('model="None"', f'model="{path.parent.name}"', 1)
    path.write_text(text, encoding="utf-8")
