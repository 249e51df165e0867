"""SAPO: reinforcement learning with a smooth gate in place of clipping (arXiv 2511.20347).

On the CPU, with a small real model:

    python examples/smollm2_prepare.py runs/smollm2/base
    accelerate launch recipes/sapo.py --config recipes/configs/smollm2_sapo_lora_cpu.yaml

On GPUs:

    # one GPU: LoRA, and QLoRA
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/sapo.py \\
        --config recipes/configs/qwen3_1.7b_sapo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/sapo.py \\
        --config recipes/configs/qwen3_4b_sapo_qlora_16gb.yaml
    # the GPUs of a machine: DDP, FSDP2, DeepSpeed ZeRO-3
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/sapo.py \\
        --config recipes/configs/qwen3_1.7b_sapo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/sapo.py \\
        --config recipes/configs/qwen3_1.7b_sapo_lora_12gb.yaml
    accelerate launch --config_file recipes/accelerate/zero3.yaml recipes/sapo.py \\
        --config recipes/configs/qwen3_1.7b_sapo_lora_12gb.yaml
    # rollouts by vLLM: in the same process, or by `trl vllm-serve --model MODEL` on other GPUs
    accelerate launch ... recipes/sapo.py --config ... --use_vllm true --vllm_mode colocate
    accelerate launch ... recipes/sapo.py --config ... --use_vllm true --vllm_mode server --vllm_server_host HOST
    # two machines, on each of them with its own rank
    accelerate launch --config_file recipes/accelerate/multi_node_fsdp2.yaml --machine_rank 0 \\
        --main_process_ip 10.0.0.1 recipes/sapo.py --config recipes/configs/qwen3_30b_a3b_sapo.yaml

Every field of the YAML file, of `trl_softgate.tasks.loading.TaskArguments`, `SAPOConfig` and `trl.ModelConfig` can be
overridden on the command line. `trl-softgate recipes` lists the files.
"""

from common import run

from trl_softgate import SAPOConfig, SAPOTrainer

if __name__ == "__main__":
    run(SAPOTrainer, SAPOConfig, __doc__)
