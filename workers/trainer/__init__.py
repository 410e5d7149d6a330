"""The trainer service: packing, the optimizer step, checkpoints and exports."""
