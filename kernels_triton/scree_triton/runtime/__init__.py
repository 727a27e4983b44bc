"""Support code of all kernel families.

- `device`: one record of hardware facts per device, and the supported dtypes.
- `descriptors`: TMA descriptors.
- `launch`: launches with named arguments, allocation, selection of the current device.
- `driver`: launches without Triton's launcher, where a call repeats the addresses of an earlier one.
- `recording`: launches recorded for another library.
- `autograd`: gradients in eager code.
- `compile`: operators for torch.compile.
- `sharding`: sharding strategies of these operators for DTensor.
- `fallback`: standard implementations in place of kernels that do not compile.
- `file_lock`: a lock between processes.
"""
