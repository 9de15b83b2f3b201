"""The class that carries the generated builder methods. `_methods.pyi`, made by `stubs`, types it."""

from cudnn_jax.graph.builders import GENERATED, Builder


class Methods:
    """One method for each operation of the tables that is not written out."""


for _operation in GENERATED.values():
    setattr(Methods, _operation.name, Builder(_operation))
