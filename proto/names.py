"""Names that the controller and the workers, or two workers, give to the same thing.

Must not load anything: the controller's pure core imports it.
"""

REGISTERED = "@"
"""Stands before the name of a function that workers know by name, in the place of a digest."""


def object_id(execution_id: str, node_id: str) -> str:
    """The id that an object has everywhere: in the controller's directory, in stores, in errors."""
    return f"{execution_id}/{node_id}"


def policy_name(version: int) -> str:
    """The name under which a trainer exposes a policy version and a replica pulls it."""
    return f"policy/{version}"
