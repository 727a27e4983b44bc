"""Support code of all kernel families.

- `device`: one record of hardware facts per device, and the supported dtypes.
- `launch`: launches with named arguments, TMA descriptors, selection of the current device.
- `autograd`: gradients in eager code.
- `compile`: operators for torch.compile.
"""
