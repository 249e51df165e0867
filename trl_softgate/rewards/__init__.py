"""Rewards that the recipes use and that no library offers in this form.

Submodules are imported on demand; see :mod:`trl_softgate.rewards.reasoning_gym`.
"""
