"""GSPO: reinforcement learning with sequence-level ratios and clipping (arXiv 2507.18071).

On the CPU, with a small real model:

    python examples/smollm2_prepare.py runs/smollm2/base
    accelerate launch recipes/gspo.py --config recipes/configs/smollm2_gspo_lora_cpu.yaml

On GPUs:

    # one GPU: LoRA, and QLoRA
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/gspo.py \\
        --config recipes/configs/qwen3_1.7b_gspo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/gspo.py \\
        --config recipes/configs/qwen3_4b_gspo_qlora_16gb.yaml
    # the GPUs of a machine: DDP, FSDP2, DeepSpeed ZeRO-3
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/gspo.py \\
        --config recipes/configs/qwen3_1.7b_gspo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/gspo.py \\
        --config recipes/configs/qwen3_1.7b_gspo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/zero3.yaml recipes/gspo.py \\
        --config recipes/configs/qwen3_1.7b_gspo_lora_12gb.yaml
    # rollouts by vLLM: in the same process, or by `trl vllm-serve --model MODEL` on other GPUs
    accelerate launch ... recipes/gspo.py --config ... --use_vllm true --vllm_mode colocate
    accelerate launch ... recipes/gspo.py --config ... --use_vllm true --vllm_mode server --vllm_server_host HOST
    # two machines, on each of them with its own rank
    accelerate launch --config_file recipes/accelerate/multi_node_fsdp2.yaml --machine_rank 0 \\
        --main_process_ip 10.0.0.1 recipes/gspo.py --config recipes/configs/qwen3_30b_a3b_gspo.yaml

Every field of the YAML file, of `trl_softgate.tasks.loading.TaskArguments`, `GSPOConfig` and `trl.ModelConfig` can be
overridden on the command line. `trl-softgate recipes` lists the files.
"""

from common import run

from trl_softgate import GSPOConfig, GSPOTrainer

if __name__ == "__main__":
    run(GSPOTrainer, GSPOConfig, __doc__)
