"""Rewards that the recipes use and that no library offers in this form.

Submodules are imported on demand: :mod:`~trl_softgate.rewards.reasoning_gym`, :mod:`~trl_softgate.rewards.math` and
:mod:`~trl_softgate.rewards.code`, whose programs run in :mod:`~trl_softgate.rewards.sandbox`.
"""
