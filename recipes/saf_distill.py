"""SAF distillation: reinforcement learning whose advantage is fused with that of a teacher, on a reasoning-gym task.

A LoRA student of SmolLM2-135M-Instruct on CPU, its teacher another adapter of the same base model:

    python examples/smollm2_prepare.py runs/smollm2/base
    python examples/smollm2_teacher_adapter.py --model runs/smollm2/base --output runs/smollm2/teacher
    accelerate launch recipes/saf_distill.py --config recipes/configs/smollm2_saf_lora_cpu.yaml

Every field of the YAML file, of `SAFDistillConfig` and of `trl.ModelConfig` can be overridden on the command line:

    accelerate launch recipes/saf_distill.py --config recipes/configs/smollm2_saf_lora_cpu.yaml \\
        --policy_objective sapo --task_name spell_backward --task_config '{"max_word_len": 4}'
"""

from common import run

from trl_softgate import SAFDistillConfig, SAFDistillTrainer

if __name__ == "__main__":
    run(SAFDistillTrainer, SAFDistillConfig, __doc__)
