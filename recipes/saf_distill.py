"""SAF distillation: reinforcement learning whose advantage is fused with that of a teacher (arXiv 2607.29209).

On the CPU, a LoRA student of SmolLM2-135M-Instruct, its teacher another adapter of the same base model:

    python examples/smollm2_prepare.py runs/smollm2/base
    python examples/smollm2_teacher_adapter.py --model runs/smollm2/base --output runs/smollm2/teacher
    accelerate launch recipes/saf_distill.py --config recipes/configs/smollm2_saf_lora_cpu.yaml

On GPUs; a file whose teacher is on a server says in its header how to start it:

    # one GPU: LoRA, and QLoRA
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/saf_distill.py \\
        --config recipes/configs/qwen3_1.7b_saf_lora_adapter_12gb.yaml
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/saf_distill.py \\
        --config recipes/configs/qwen3_4b_saf_qlora_adapter_16gb.yaml
    # the GPUs of a machine: DDP, FSDP2, DeepSpeed ZeRO-3
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/saf_distill.py \\
        --config recipes/configs/qwen3_1.7b_saf_lora_adapter_12gb.yaml
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/saf_distill.py \\
        --config recipes/configs/qwen3_8b_math_saf.yaml
    accelerate launch --config_file recipes/accelerate/zero3.yaml recipes/saf_distill.py \\
        --config recipes/configs/qwen3_8b_math_saf.yaml
    # rollouts by vLLM: in the same process, or by `trl vllm-serve --model MODEL` on other GPUs
    accelerate launch ... recipes/saf_distill.py --config ... --use_vllm true --vllm_mode colocate
    accelerate launch ... recipes/saf_distill.py --config ... --use_vllm true --vllm_mode server \\
        --vllm_server_host HOST
    # two machines, on each of them with its own rank
    accelerate launch --config_file recipes/accelerate/multi_node_fsdp2.yaml --machine_rank 0 \\
        --main_process_ip 10.0.0.1 recipes/saf_distill.py --config recipes/configs/qwen3_8b_math_saf.yaml \\
        --gradient_accumulation_steps 64

Every field of the YAML file, of `trl_softgate.tasks.loading.TaskArguments`, `SAFDistillConfig` and `trl.ModelConfig`
can be overridden on the command line. `trl-softgate recipes` lists the files. For example:

    accelerate launch recipes/saf_distill.py --config recipes/configs/smollm2_saf_lora_cpu.yaml \\
        --policy_objective sapo --task_name spell_backward --task_config '{"max_word_len": 4}'
"""

from common import run

from trl_softgate import SAFDistillConfig, SAFDistillTrainer

if __name__ == "__main__":
    run(SAFDistillTrainer, SAFDistillConfig, __doc__)
