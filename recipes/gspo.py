"""GSPO: sequence-level ratios and clipping, on a reasoning-gym task.

    python examples/smollm2_prepare.py runs/smollm2/base
    accelerate launch recipes/gspo.py --config recipes/configs/smollm2_gspo_lora_cpu.yaml

Every field of the YAML file, of `GSPOConfig` and of `trl.ModelConfig` can be overridden on the command line.
"""

from common import run

from trl_softgate import GSPOConfig, GSPOTrainer

if __name__ == "__main__":
    run(GSPOTrainer, GSPOConfig, __doc__)
