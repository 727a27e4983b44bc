"""The names of every module of `scree.xp`. Written by ``nox -s generate``."""

from ..standard import Namespace as _Namespace

_xp: _Namespace

__array_api_version__ = _xp.__array_api_version__
__array_namespace_info__ = _xp.__array_namespace_info__
abs = _xp.abs
acos = _xp.acos
acosh = _xp.acosh
add = _xp.add
all = _xp.all
any = _xp.any
arange = _xp.arange
argmax = _xp.argmax
argmin = _xp.argmin
argsort = _xp.argsort
asarray = _xp.asarray
asin = _xp.asin
asinh = _xp.asinh
astype = _xp.astype
atan = _xp.atan
atan2 = _xp.atan2
atanh = _xp.atanh
bitwise_and = _xp.bitwise_and
bitwise_invert = _xp.bitwise_invert
bitwise_left_shift = _xp.bitwise_left_shift
bitwise_or = _xp.bitwise_or
bitwise_right_shift = _xp.bitwise_right_shift
bitwise_xor = _xp.bitwise_xor
bool = _xp.bool
broadcast_arrays = _xp.broadcast_arrays
broadcast_shapes = _xp.broadcast_shapes
broadcast_to = _xp.broadcast_to
can_cast = _xp.can_cast
ceil = _xp.ceil
clip = _xp.clip
complex128 = _xp.complex128
complex64 = _xp.complex64
concat = _xp.concat
conj = _xp.conj
copysign = _xp.copysign
cos = _xp.cos
cosh = _xp.cosh
count_nonzero = _xp.count_nonzero
cumulative_prod = _xp.cumulative_prod
cumulative_sum = _xp.cumulative_sum
diff = _xp.diff
divide = _xp.divide
e = _xp.e
empty = _xp.empty
empty_like = _xp.empty_like
equal = _xp.equal
exp = _xp.exp
expand_dims = _xp.expand_dims
expm1 = _xp.expm1
eye = _xp.eye
fft = _xp.fft
finfo = _xp.finfo
flip = _xp.flip
float32 = _xp.float32
float64 = _xp.float64
floor = _xp.floor
floor_divide = _xp.floor_divide
from_dlpack = _xp.from_dlpack
full = _xp.full
full_like = _xp.full_like
greater = _xp.greater
greater_equal = _xp.greater_equal
hypot = _xp.hypot
iinfo = _xp.iinfo
imag = _xp.imag
inf = _xp.inf
int16 = _xp.int16
int32 = _xp.int32
int64 = _xp.int64
int8 = _xp.int8
isdtype = _xp.isdtype
isfinite = _xp.isfinite
isin = _xp.isin
isinf = _xp.isinf
isnan = _xp.isnan
less = _xp.less
less_equal = _xp.less_equal
linalg = _xp.linalg
linspace = _xp.linspace
log = _xp.log
log10 = _xp.log10
log1p = _xp.log1p
log2 = _xp.log2
logaddexp = _xp.logaddexp
logical_and = _xp.logical_and
logical_not = _xp.logical_not
logical_or = _xp.logical_or
logical_xor = _xp.logical_xor
matmul = _xp.matmul
matrix_transpose = _xp.matrix_transpose
max = _xp.max
maximum = _xp.maximum
mean = _xp.mean
meshgrid = _xp.meshgrid
min = _xp.min
minimum = _xp.minimum
moveaxis = _xp.moveaxis
multiply = _xp.multiply
nan = _xp.nan
negative = _xp.negative
newaxis = _xp.newaxis
nextafter = _xp.nextafter
nonzero = _xp.nonzero
not_equal = _xp.not_equal
ones = _xp.ones
ones_like = _xp.ones_like
permute_dims = _xp.permute_dims
pi = _xp.pi
positive = _xp.positive
pow = _xp.pow
prod = _xp.prod
ragged = _xp.ragged
real = _xp.real
reciprocal = _xp.reciprocal
remainder = _xp.remainder
repeat = _xp.repeat
reshape = _xp.reshape
result_type = _xp.result_type
roll = _xp.roll
round = _xp.round
searchsorted = _xp.searchsorted
sign = _xp.sign
signbit = _xp.signbit
sin = _xp.sin
sinh = _xp.sinh
sort = _xp.sort
sqrt = _xp.sqrt
square = _xp.square
squeeze = _xp.squeeze
stack = _xp.stack
std = _xp.std
subtract = _xp.subtract
sum = _xp.sum
take = _xp.take
take_along_axis = _xp.take_along_axis
tan = _xp.tan
tanh = _xp.tanh
tensordot = _xp.tensordot
tile = _xp.tile
tril = _xp.tril
triu = _xp.triu
trunc = _xp.trunc
uint16 = _xp.uint16
uint32 = _xp.uint32
uint64 = _xp.uint64
uint8 = _xp.uint8
unique_all = _xp.unique_all
unique_counts = _xp.unique_counts
unique_inverse = _xp.unique_inverse
unique_values = _xp.unique_values
unstack = _xp.unstack
var = _xp.var
vecdot = _xp.vecdot
where = _xp.where
zeros = _xp.zeros
zeros_like = _xp.zeros_like

__all__ = [
    "__array_api_version__",
    "__array_namespace_info__",
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "can_cast",
    "ceil",
    "clip",
    "complex128",
    "complex64",
    "concat",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "divide",
    "e",
    "empty",
    "empty_like",
    "equal",
    "exp",
    "expand_dims",
    "expm1",
    "eye",
    "fft",
    "finfo",
    "flip",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "from_dlpack",
    "full",
    "full_like",
    "greater",
    "greater_equal",
    "hypot",
    "iinfo",
    "imag",
    "inf",
    "int16",
    "int32",
    "int64",
    "int8",
    "isdtype",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "linalg",
    "linspace",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "meshgrid",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "nan",
    "negative",
    "newaxis",
    "nextafter",
    "nonzero",
    "not_equal",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "positive",
    "pow",
    "prod",
    "ragged",
    "real",
    "reciprocal",
    "remainder",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "searchsorted",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sort",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "tril",
    "triu",
    "trunc",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]
