"""The Triton kernels of PyTorch for JAX on CUDA, launched by custom calls of jaxlib.

Importing this package imports neither JAX, nor torch, nor Triton. The kernels need Triton, and torch
for the launch configs. A build of torch for the CPU is enough.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

#: The provider's name. The kernels for PyTorch have another name, because a registration replaces an
#: earlier one of the same name.
PROVIDER = "triton_jax"


def register() -> None:
    """Register the kernels with scree, if JAX has a CUDA device, and Triton and torch are installed.

    scree calls this function through the entry-point group ``scree.kernels``.
    """
    if not (find_spec("triton") and find_spec("torch")):
        return
    import jax
    import jaxlib.gpu_triton as plugin  # registers the custom call

    from scree import register_kernel

    if jax.default_backend() != "gpu" or "triton_kernel_call_ffi" not in _targets(plugin):
        return
    devices = import_module(".devices", __name__)
    devices.describe_gpu(jax.local_devices()[0], hasattr(plugin, "create_tma_descriptor_parameter"))
    kernels = import_module(".attention", __name__)
    register_kernel("attention", provider=PROVIDER, rejects=kernels.rejects, note=kernels.note)(
        kernels.attention
    )
    register_operations()


def register_operations() -> None:
    """Register the kernels of all operations except attention."""
    from scree import register_kernel

    operations = import_module(".operations", __name__)
    for name in operations.TABLE:
        register_kernel(name, provider=PROVIDER, rejects=partial(operations.rejects, name))(
            partial(operations.run, name)
        )
    losses = import_module(".linear_cross_entropy", __name__)
    register_kernel("linear_cross_entropy", provider=PROVIDER, rejects=losses.rejects)(
        losses.linear_cross_entropy
    )


def _targets(plugin: object) -> object:
    """Return the names of the custom calls of jaxlib's CUDA plugin.

    jaxlib has no public name for them. Without the private one nothing is registered, and JAX runs
    the loops.
    """
    cuda = getattr(plugin, "_cuda_triton", None)
    return cuda.registrations() if cuda else ()
