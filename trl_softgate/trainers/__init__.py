"""The trainers: one base between TRL's `GRPOTrainer` and the three methods, each a config and a thin trainer."""
