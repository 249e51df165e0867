"""What is installed and works on this machine, and what fits on a GPU. Imports nothing heavy until it is asked.

The memory of a setup is a sum of terms, each with its arithmetic. Letters: P parameters of the student, L of its
adapter. Bytes are on each GPU; GB = 1e9 bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape

from . import __version__
from .validation import require_number, require_whole

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = (
    "torch",
    "trl",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "deepspeed",
    "vllm",
    "bitsandbytes",
)
# An import that takes longer is as good as broken.
TIME_LIMIT = 120.0

_IMPORTED = "imported"


class EnvironmentProblem(ValueError):
    """A model whose memory cannot be estimated; the message says why, in one sentence."""


@dataclass(frozen=True)
class Device:
    """`memory` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Tool:
    """Whether a library works here; each answer is None if an earlier one is no. `reason` says why not, else empty."""

    name: str
    installed: bool
    importable: bool | None
    supported: bool | None
    reason: str


@dataclass(frozen=True)
class _Probe:
    """`check` runs after `import module` in a process of its own, and fails where the device is not supported."""

    name: str
    module: str
    install: str
    check: str


_PROBES = (
    _Probe(
        "vLLM",
        "vllm",
        "pip install -e '.[vllm]', in an environment of its own, without constraints.txt",
        "from vllm.platforms import current_platform\n"
        "assert not current_platform.is_unspecified(), 'vLLM finds no device that it supports'",
    ),
    _Probe(
        "DeepSpeed",
        "deepspeed",
        "pip install -c constraints.txt -e '.[deepspeed]'",
        "import torch\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "found = get_accelerator().device_name()\n"
        "assert found == 'cuda' or not torch.cuda.is_available(), f'DeepSpeed chose the device {found}'",
    ),
    _Probe(
        "bitsandbytes",
        "bitsandbytes",
        "pip install -c constraints.txt -e '.[quantization]'",
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "weight = torch.ones(64, 64, dtype=torch.bfloat16, device=device)\n"
        "bitsandbytes.functional.dequantize_4bit(*bitsandbytes.functional.quantize_4bit(weight))",
    ),
    _Probe(
        "flash attention",
        "flash_attn",
        "pip install flash-attn --no-build-isolation",
        "import torch\n"
        "assert torch.cuda.is_available(), 'flash attention needs a GPU'\n"
        "q = torch.ones(1, 16, 1, 64, dtype=torch.bfloat16, device='cuda')\n"
        "flash_attn.flash_attn_func(q, q, q)",
    ),
)


def versions() -> dict[str, str | None]:
    """Package, and python -> version; None if it is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "trl_softgate": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def devices() -> list[Device]:
    """The GPUs that torch sees; without any, the CPU with the memory of the machine."""
    import psutil
    import torch

    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    cpu = Device(f"CPU, {os.cpu_count()} cores", psutil.virtual_memory().total)
    return [Device(gpu.name, gpu.total_memory) for gpu in gpus] or [cpu]


def tools(time_limit: float = TIME_LIMIT) -> list[Tool]:
    """What vLLM, DeepSpeed, bitsandbytes and flash attention are good for here.

    Each is imported in a process of its own, so that one that crashes or hangs ends within `time_limit` seconds.
    """
    require_number("time_limit", time_limit, above=0)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda probe: _try(probe, time_limit), _PROBES))


def _try(probe: _Probe, time_limit: float) -> Tool:
    code = (
        "import importlib.util, sys\n"
        f"if importlib.util.find_spec({probe.module!r}) is None: sys.exit()\n"
        f"print('installed', flush=True)\nimport {probe.module}\nprint({_IMPORTED!r}, flush=True)\n{probe.check}\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=time_limit)
        output, status, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        output, status, errors = _decoded(late.stdout), None, ""
    lines = output.splitlines()
    if "installed" not in lines and status == 0:
        return Tool(probe.name, False, None, None, probe.install)
    importable = _IMPORTED in lines
    reason = ""
    if status is None:
        reason = f"not done after {time_limit:g} s"
    elif status < 0:
        reason = f"crashed with signal {-status}"
    elif status > 0:
        reason = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), f"exit code {status}")
    return Tool(probe.name, True, importable, (status == 0) if importable else None, reason)


def _decoded(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


Method = Literal["full", "LoRA", "QLoRA"]
Teacher = Literal["none", "local", "adapter", "server"]
Backend = Literal["DDP", "ZeRO-2", "FSDP2/ZeRO-3"]

METHODS: tuple[Method, ...] = ("full", "LoRA", "QLoRA")
TEACHERS: tuple[Teacher, ...] = ("none", "local", "adapter", "server")
# In the order of what they cost in communication. On one GPU, DDP is that GPU alone.
BACKENDS: tuple[Backend, ...] = ("DDP", "ZeRO-2", "FSDP2/ZeRO-3")

# Of TRL's fused LM head: a tile of so many tokens by so many rows of the vocabulary is all there is of the logits.
_TILE_TOKENS = 4096
_TILE_VOCABULARY = 32768
# NF4: half a byte for a weight, and a float32 for 64 of them.
_FOUR_BIT = 0.5 + 4 / 64
# For the CUDA context, workspaces and fragmentation.
_FREE = 0.1


@dataclass(frozen=True)
class ModelSize:
    """Counted on a model without storage.

    Attributes:
        name: as given.
        parameters: P, tied ones once.
        largest_layer: parameters of the largest piece that is gathered as one: a block, the embedding or the LM head.
        quantizable: parameters that QLoRA stores in four bits: linear layers other than the LM head.
        lora: trained parameters of a LoRA on all linear layers.
        layers: number of blocks.
        hidden: width.
        vocabulary: rows of the LM head.
        block_bytes: what the backward of one recomputed block keeps for a token, see `_block_bytes`.
    """

    name: str
    parameters: int
    largest_layer: int
    quantizable: int
    lora: int
    layers: int
    hidden: int
    vocabulary: int
    block_bytes: int


@dataclass(frozen=True)
class Term:
    """A part of the memory, in bytes on each GPU, and how it was computed."""

    name: str
    size: float
    arithmetic: str


@dataclass(frozen=True)
class Setup:
    """One way to train, and what it takes."""

    method: Method
    teacher: Teacher
    backend: Backend
    gpus: int
    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """Bytes on each GPU."""
        return sum(term.size for term in self.terms)

    @property
    def config(self) -> str:
        """The configuration of accelerate that launches it."""
        name = {"DDP": "ddp" if self.gpus > 1 else "single_gpu", "ZeRO-2": "zero2", "FSDP2/ZeRO-3": "fsdp2"}
        return f"recipes/accelerate/{name[self.backend]}.yaml"

    def fits(self, gpu_memory: float) -> bool:
        """Whether it leaves a tenth of `gpu_memory` (GB) free, for the CUDA context, workspaces and fragmentation."""
        return self.total <= (1 - _FREE) * gpu_memory * 1e9


def model_size(name: str, lora_rank: int = 16) -> ModelSize:
    """Count the parameters of a model from its `config.json` alone, exactly, without its weights.

    Args:
        name: folder, or name on the hub. Code in it is not run.
        lora_rank: of a LoRA on all linear layers, >= 1.

    Raises:
        EnvironmentProblem: there is no such model, no `config.json`, or no causal language model of that kind.
    """
    import torch
    from accelerate.utils import calculate_maximum_sizes
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    require_whole("lora_rank", lora_rank, minimum=1)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise EnvironmentProblem(f"The folder {name} has no config.json.")
    try:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(
            f"{name} is neither a folder with the config.json of a causal language model nor the name of one on the "
            "hub that can be reached."
        ) from error
    head = model.get_output_embeddings()
    text = config.get_text_config()
    linear = [module for module in model.modules() if type(module) is torch.nn.Linear and module is not head]
    size = dict(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        largest_layer=calculate_maximum_sizes(model)[1][0] // 4,  # bytes of float32
        quantizable=sum(module.weight.numel() for module in linear),
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of how it would train
        adapted: Any = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    return ModelSize(
        name=name,
        **size,
        lora=sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        block_bytes=_block_bytes(text),
    )


def _block_bytes(config: Any) -> int:
    """Bytes for a token that the backward of one block keeps, in bfloat16 with norms in float32 and an attention that
    stores no scores (sdpa, flash): h width, q and kv widths of the queries, and of keys and values together, i of the
    MLP (of the active experts together). 16h + 10q + 6kv + 8i, and 4h for each active expert, is within 5 % of what
    autograd saves in Qwen3 and Qwen3-MoE.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts_per_tok", None) or 0
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts:
        mlp = experts * (getattr(config, "moe_intermediate_size", None) or mlp)
    # each active expert has the token's input and output to itself
    return config.hidden_size * (16 + 4 * experts) + 10 * heads * width + 12 * kv_heads * width + 8 * mlp


def estimate(
    student: ModelSize,
    method: Method,
    teacher: Teacher,
    backend: Backend,
    *,
    tokens: int,
    gpus: int = 1,
    local_teacher: ModelSize | None = None,
) -> Setup | None:
    """Memory of one setup with AdamW, bfloat16 and gradient checkpointing; None if there is no such setup.

    Weights, gradients and AdamW of full training are those of DeepSpeed's `estimate_zero2_model_states_mem_needs` and
    `estimate_zero3_model_states_mem_needs`: weights in bfloat16 and float32, gradients in float32 (ZeRO-2: in both),
    two float32 moments. FSDP2 casts a layer at a time and needs 2 bytes less. The base of LoRA and the local teacher
    are in bfloat16.

    The sum is an upper bound: not all terms are at their peak at the same time. Generation is not in it.

    Args:
        tokens: prompt and completion tokens of a micro-batch on one GPU.
        gpus: N.
        local_teacher: of the teacher "local"; default: the student's.
    """
    require_whole("tokens", tokens, minimum=1)
    require_whole("gpus", gpus, minimum=1)
    if method == "full" and teacher == "adapter":
        return None  # shares the student's base model, which full fine-tuning changes
    alone, sharded = backend == "DDP", backend == "FSDP2/ZeRO-3"
    n, m = (1 if alone else gpus), (gpus if sharded else 1)  # what always is divided by, and what if all is sharded
    p, trained = student.parameters, student.parameters if method == "full" else student.lora
    letters = f"P = {_amount(p)}" if method == "full" else f"P = {_amount(p)}, L = {_amount(trained)}"
    x = "P" if method == "full" else "L"

    frozen, frozen_text = 0.0, ""
    if method == "LoRA":
        frozen, frozen_text = 2 * p / m, f"2P{_over(m)} + "
    elif method == "QLoRA":
        # whole also where the rest is sharded: accelerate leaves weights in four bits out of FSDP2
        frozen = _FOUR_BIT * student.quantizable + 2 * (p - student.quantizable)
        frozen_text = f"{_FOUR_BIT:g}Q + 2(P - Q), Q = {_amount(student.quantizable)}, + "
    gradient_bytes, why = 4, "float32"
    if alone and gpus > 1:
        gradient_bytes, why = 8, "float32, and once more in DDP's buckets"
    elif backend == "ZeRO-2":
        gradient_bytes, why = 6, "bfloat16 and float32"
    block = student.layers * student.hidden * (4 if alone and method == "full" else 2)
    head = 4 * student.vocabulary * student.hidden if method == "full" else 0
    tile = 2 * min(tokens, _TILE_TOKENS) * _TILE_VOCABULARY
    terms = [
        Term(
            "weights",
            frozen + 2 * trained / m + 4 * trained / n,
            f"{frozen_text}2{x}{_over(m)} + 4{x}{_over(n)}: in bfloat16 and in float32, {letters}",
        ),
        Term("gradients", gradient_bytes * trained / n, f"{gradient_bytes}{x}{_over(n)}: {why}"),
        Term("AdamW", 8 * trained / n, f"8{x}{_over(n)}: two moments in float32"),
        Term(
            "activations",
            tokens * (block + student.block_bytes),
            f"{tokens:,} tokens x ({block:,} between {student.layers} blocks + {student.block_bytes:,} in one)",
        ),
        Term(
            "LM head",
            tile + 4 * tokens * student.hidden + head,
            f"2 x {min(tokens, _TILE_TOKENS):,} x {_TILE_VOCABULARY:,} of the logits + 4 x {tokens:,} x "
            f"{student.hidden:,} of their gradient{f' + {head:,} of the weight gradient' if head else ''}",
        ),
    ]
    if sharded and method != "QLoRA":
        gathered = student.largest_layer
        terms.append(Term("gathered", 4 * gathered, f"2 layers x 2 bytes x {_amount(gathered)}"))
    if teacher == "local":
        own = local_teacher or student
        whole = 4 * own.largest_layer if sharded else 0
        gathered_text = f" + 4 x {_amount(own.largest_layer)} gathered" if sharded else ""
        text = f"2 x {_amount(own.parameters)}{_over(m)}{gathered_text}: bfloat16, frozen"
        terms.append(Term("teacher", 2 * own.parameters / m + whole, text))
    elif teacher == "adapter":
        terms.append(Term("teacher", 4 * student.lora, f"4L: float32, L = {_amount(student.lora)}, on the same base"))
    elif teacher == "server":
        terms.append(Term("teacher", 0, "on GPUs of its own"))
    return Setup(method, teacher, backend, gpus, tuple(terms))


def estimates(
    student: ModelSize, *, tokens: int, gpus: int = 1, local_teacher: ModelSize | None = None
) -> list[Setup]:
    """Every setup there is, by method, teacher and backend, in the order of `METHODS`, `TEACHERS` and `BACKENDS`."""
    setups = (
        estimate(student, method, teacher, backend, tokens=tokens, gpus=gpus, local_teacher=local_teacher)
        for method in METHODS
        for teacher in TEACHERS
        for backend in BACKENDS
    )
    return [setup for setup in setups if setup is not None]


def first_that_fits(setups: Sequence[Setup], gpu_memory: float) -> dict[tuple[Method, Teacher], Setup]:
    """Method and teacher -> the backend that fits `gpu_memory` (GB) with the least communication."""
    require_number("gpu_memory", gpu_memory, above=0)
    found: dict[tuple[Method, Teacher], Setup] = {}
    for setup in setups:
        if setup.fits(gpu_memory):
            found.setdefault((setup.method, setup.teacher), setup)
    return found


def recipes_for(model: str, folder: Path = Path("recipes/configs")) -> list[Path]:
    """The YAML files in `folder`, seen from the working directory, that train `model`."""
    import yaml

    files = sorted(folder.glob("*.yaml"))
    return [file for file in files if yaml.safe_load(file.read_text()).get("model_name_or_path") == model]


def _over(n: int) -> str:
    return "" if n == 1 else f"/{n}"


def _amount(parameters: float) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def print_environment(console: Console) -> None:
    """Versions, devices, and what works here, as tables."""
    from rich.table import Table

    table = Table("package", "version", title="Versions")
    for package, found in versions().items():
        table.add_row(package, found or "[dim]not installed[/dim]")
    console.print(table)
    table = Table("device", "memory (GB)", title="Devices")
    for device in devices():
        table.add_row(device.name, f"{device.memory / 1e9:.1f}")
    console.print(table)
    table = Table("library", "installed", "imports", "works on this device", title="What works here")
    table.add_column("why not", overflow="fold")
    with console.status("Trying the libraries"):
        tried = tools()
    for tool in tried:
        answers = [{True: "yes", False: "no", None: "-"}[a] for a in (tool.installed, tool.importable, tool.supported)]
        table.add_row(tool.name, *answers, escape(tool.reason))
    console.print(table)


def print_estimates(
    console: Console,
    student: ModelSize,
    *,
    gpu_memory: float,
    gpus: int,
    tokens: int,
    local_teacher: ModelSize | None = None,
    explain: bool = False,
) -> None:
    """The memory of every setup, the arithmetic of the cheapest (`explain`: of all), and how to launch it."""
    from rich.table import Table

    setups = estimates(student, tokens=tokens, gpus=gpus, local_teacher=local_teacher)
    first = first_that_fits(setups, gpu_memory)
    table = Table(
        "training",
        "teacher",
        *(_backend(backend, gpus) for backend in BACKENDS),
        "first that fits, in recipes/accelerate",
        title=f"GB on each of {gpus} GPU{'s' if gpus > 1 else ''} of {gpu_memory:g} GB: {escape(student.name)}, "
        f"{_amount(student.parameters)} parameters, {tokens:,} tokens per micro-batch",
    )
    for method in METHODS:
        for teacher in TEACHERS:
            row = [setup for setup in setups if (setup.method, setup.teacher) == (method, teacher)]
            cells = [f"[{'green' if s.fits(gpu_memory) else 'red'}]{s.total / 1e9:.1f}[/]" for s in row]
            best = first.get((method, teacher))
            table.add_row(method, teacher, *(cells or "---"), Path(best.config).name if best else "-")
    console.print(table)
    cheapest = min(first.values(), key=lambda setup: setup.total, default=None)
    for setup in setups if explain else [cheapest or min(setups, key=lambda setup: setup.total)]:
        table = Table("term", "GB", "arithmetic", title=f"{_title(setup)}: {setup.total / 1e9:.2f} GB")
        for term in setup.terms:
            table.add_row(term.name, f"{term.size / 1e9:.2f}", term.arithmetic)
        console.print(table)
    if cheapest is None:
        console.print(
            "None fits: take fewer --tokens, more or larger GPUs, or recipes/accelerate/zero3_offload.yaml, which "
            "uses the memory of the host."
        )
    else:
        options = {"full": "", "LoRA": " --use_peft true", "QLoRA": " --use_peft true --load_in_4bit true"}
        dtype = "" if cheapest.method == "full" else " --dtype bfloat16"
        console.print(
            f"The cheapest that fits: {_title(cheapest)}. accelerate launch --config_file {cheapest.config} "
            f"--num_processes {gpus} ... --bf16 true{dtype}{options[cheapest.method]}",
            highlight=False,
        )
    for file in recipes_for(student.name):
        console.print(f"A recipe for this model: {file}")
    console.print(
        "A tenth of each GPU is left free for the CUDA context, workspaces and fragmentation. These are sums, not "
        "measurements; generation (cache, vLLM) is not in them."
    )


def _backend(backend: Backend, gpus: int) -> str:
    return "one GPU" if backend == "DDP" and gpus == 1 else backend


def _title(setup: Setup) -> str:
    teacher = "no teacher" if setup.teacher == "none" else f"{setup.teacher} teacher"
    return f"{setup.method} training, {teacher}, {_backend(setup.backend, setup.gpus)}"
