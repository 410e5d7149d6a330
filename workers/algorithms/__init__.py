"""The mathematics of policy optimisation as pure functions of arrays.

Owns formulas: advantages, token log-probabilities, clipped losses, KL estimators, aggregation.
Must not know about meshes, processes, configs or services.
Called by the trainer (`waypath.workers.trainer`) and by tests with hand-computed values.
"""
