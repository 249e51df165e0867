"""SAPO: a smooth gate in place of clipping, on a reasoning-gym task.

    python examples/smollm2_prepare.py runs/smollm2/base
    accelerate launch recipes/sapo.py --config recipes/configs/smollm2_sapo_lora_cpu.yaml

Every field of the YAML file, of `SAPOConfig` and of `trl.ModelConfig` can be overridden on the command line.
"""

from common import run

from trl_softgate import SAPOConfig, SAPOTrainer

if __name__ == "__main__":
    run(SAPOTrainer, SAPOConfig, __doc__)
