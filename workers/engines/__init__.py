"""Rollout engines behind one protocol, and the `rollout` service that runs one in a worker."""
