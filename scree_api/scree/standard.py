"""`Namespace`, the type of `scree.namespace`: every function with its signature and documentation.

Written by ``nox -s generate`` from `standard.toml`.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from . import ragged as _ragged
from .array import Array

__all__ = ["DenseArray", "Fft", "Linalg", "Namespace", "Ragged"]

T = TypeVar("T")
Axes: TypeAlias = int | tuple[int, ...] | None
Flag: TypeAlias = builtins.bool  # the standard has a data type of the name bool


class DenseArray(Protocol):
    """A dense array of any library of the standard; a ragged array is none."""

    def __dlpack__(self) -> Any:
        """Export the array."""
        ...


class Ragged:
    """The type of `xp.ragged`: the operations that the standard lacks."""

    align = staticmethod(_ragged.align)
    append_paged = staticmethod(_ragged.append_paged)
    attention = staticmethod(_ragged.attention)
    broadcast_rows = staticmethod(_ragged.broadcast_rows)
    conv1d = staticmethod(_ragged.conv1d)
    cross_entropy = staticmethod(_ragged.cross_entropy)
    dropout = staticmethod(_ragged.dropout)
    erf = staticmethod(_ragged.erf)
    from_cu_seqlens = staticmethod(_ragged.from_cu_seqlens)
    from_lengths = staticmethod(_ragged.from_lengths)
    from_offsets = staticmethod(_ragged.from_offsets)
    from_padded = staticmethod(_ragged.from_padded)
    from_segment_ids = staticmethod(_ragged.from_segment_ids)
    gather = staticmethod(_ragged.gather)
    gelu = staticmethod(_ragged.gelu)
    group = staticmethod(_ragged.group)
    layer_norm = staticmethod(_ragged.layer_norm)
    linear_cross_entropy = staticmethod(_ragged.linear_cross_entropy)
    log_softmax = staticmethod(_ragged.log_softmax)
    logsumexp = staticmethod(_ragged.logsumexp)
    merge_attention = staticmethod(_ragged.merge_attention)
    pack = staticmethod(_ragged.pack)
    paged_attention = staticmethod(_ragged.paged_attention)
    positions = staticmethod(_ragged.positions)
    relu = staticmethod(_ragged.relu)
    rms_norm = staticmethod(_ragged.rms_norm)
    rope = staticmethod(_ragged.rope)
    same_layout = staticmethod(_ragged.same_layout)
    scatter = staticmethod(_ragged.scatter)
    scatter_add = staticmethod(_ragged.scatter_add)
    segment_ids = staticmethod(_ragged.segment_ids)
    shift = staticmethod(_ragged.shift)
    silu = staticmethod(_ragged.silu)
    softmax = staticmethod(_ragged.softmax)
    split = staticmethod(_ragged.split)
    swiglu = staticmethod(_ragged.swiglu)
    to_padded = staticmethod(_ragged.to_padded)
    topk = staticmethod(_ragged.topk)
    unpack = staticmethod(_ragged.unpack)
    validate_pages = staticmethod(_ragged.validate_pages)


class Linalg(Protocol):
    """The type of `xp.linalg`, an extension of the standard."""

    def cholesky(self, x: T, /, *, upper: Flag = False) -> T:
        """Cholesky factor of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        upper
            Return the upper factor instead of the lower one.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.cholesky(m).values.round(2)
        array([[[1.41, 0.  ],
                [0.71, 1.22]]])
        """
        raise NotImplementedError

    def cross(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """Cross product of vectors of three elements.

        It takes no ragged arrays: it is defined on vectors of one size; apply it to arr.values.

        Parameters
        ----------
        x1
            Dense array.
        x2
            Dense array.
        axis
            Axis of three elements.

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def det(self, x: T, /) -> T:
        """Determinant of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.det(m).values.round(2)
        array([3.])
        """
        raise NotImplementedError

    def diagonal(self, x: T, /, *, offset: int = 0) -> T:
        """Diagonal of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        offset
            Diagonal: 0 is the main one, positive ones are above.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.diagonal(m).tolist()
        [[[2.0, 2.0]]]
        """
        raise NotImplementedError

    def eig(self, x: Any, /) -> Any:
        """Eigenvalues and eigenvectors of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `eigenvalues` and `eigenvectors`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.eig(m).eigenvectors.shape
        (1, None, 2, 2)
        """
        raise NotImplementedError

    def eigh(self, x: Any, /) -> Any:
        """Eigenvalues and eigenvectors of each symmetric matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `eigenvalues` and `eigenvectors`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.eigh(m).eigenvalues.values.round(2)
        array([[1., 3.]])
        """
        raise NotImplementedError

    def eigvals(self, x: T, /) -> T:
        """Eigenvalues of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.eigvals(m).shape
        (1, None, 2)
        """
        raise NotImplementedError

    def eigvalsh(self, x: T, /) -> T:
        """Eigenvalues of each symmetric matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.eigvalsh(m).values.round(2)
        array([[1., 3.]])
        """
        raise NotImplementedError

    def inv(self, x: T, /) -> T:
        """Inverse of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.inv(m).values.round(2)
        array([[[ 0.67, -0.33],
                [-0.33,  0.67]]])
        """
        raise NotImplementedError

    @overload
    def matmul(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def matmul(self, x1: Any, x2: Any, /) -> Array: ...

    def matmul(self, x1: Any, x2: Any, /) -> Any:
        """Matrix product.

        Ragged arrays: ``(n, None, ..., k) @ (k, m)`` multiplies each token, ``(n, None, k) @
        (n, k, m)`` each row by its own matrix.

        Parameters
        ----------
        x1
            Ragged or dense array.
        x2
            Dense array (k, m), (k,) or (n, k, m).

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.matmul(xp.expand_dims(x, axis=2), xp.ones((1, 2))).shape
        (2, None, 2)
        """
        raise NotImplementedError

    def matrix_norm(self, x: T, /, *, keepdims: Flag = False, ord: Any = "fro") -> T:
        """Norm of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        keepdims
            Keep the reduced axes, with size 1.
        ord
            Order of the norm.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.matrix_norm(m).values.round(2)
        array([3.16])
        """
        raise NotImplementedError

    def matrix_power(self, x: T, n: int, /) -> T:
        """Power of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            The power.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.matrix_power(m, 2).tolist()
        [[[[5.0, 4.0], [4.0, 5.0]]]]
        """
        raise NotImplementedError

    def matrix_rank(self, x: T, /, *, rtol: Any = None) -> T:
        """Rank of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        rtol
            Relative tolerance: smaller singular values count as 0.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.matrix_rank(m).tolist()
        [[2]]
        """
        raise NotImplementedError

    def matrix_transpose(self, x: T, /) -> T:
        """Swap the last two axes.

        Ragged arrays: One of them may be the ragged axis.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.matrix_transpose(xp.expand_dims(x, axis=2)).shape
        (2, 1, None)
        """
        raise NotImplementedError

    def outer(self, x1: Any, x2: Any, /) -> Any:
        """Products of all pairs of elements of two vectors.

        It takes no ragged arrays: it is defined on vectors of one size; apply it to arr.values.

        Parameters
        ----------
        x1
            Dense vector.
        x2
            Dense vector.

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def pinv(self, x: T, /, *, rtol: Any = None) -> T:
        """Moore-Penrose inverse of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        rtol
            Relative tolerance: smaller singular values count as 0.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.pinv(m).values.round(2)
        array([[[ 0.67, -0.33],
                [-0.33,  0.67]]])
        """
        raise NotImplementedError

    def qr(self, x: Any, /, *, mode: str = "reduced") -> Any:
        """QR decomposition of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        mode
            "reduced" or "complete".

        Returns
        -------
        named tuple
            `Q` and `R`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.qr(m).R.shape
        (1, None, 2, 2)
        """
        raise NotImplementedError

    def slogdet(self, x: Any, /) -> Any:
        """Sign and logarithm of the determinant of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `sign` and `logabsdet`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.slogdet(m).logabsdet.values.round(2)
        array([1.1])
        """
        raise NotImplementedError

    def solve(self, x1: T, x2: Any, /) -> T:
        """The solution of a linear system per matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x1
            Ragged or dense array of square matrices.
        x2
            Right-hand sides: vectors or matrices.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.solve(m, xp.ones((2, 1))).values.round(2)
        array([[[0.33],
                [0.33]]])
        """
        raise NotImplementedError

    def svd(self, x: Any, /, *, full_matrices: Flag = True) -> Any:
        """Singular value decomposition of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        full_matrices
            Return square `U` and `Vh`.

        Returns
        -------
        named tuple
            `U`, `S` and `Vh`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.svd(m).S.values.round(2)
        array([[3., 1.]])
        """
        raise NotImplementedError

    def svdvals(self, x: T, /) -> T:
        """Singular values of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.svdvals(m).values.round(2)
        array([[3., 1.]])
        """
        raise NotImplementedError

    @overload
    def tensordot(
        self, x1: DenseArray | complex, x2: DenseArray | complex, /, *, axes: Any = 2
    ) -> Any: ...

    @overload
    def tensordot(self, x1: Any, x2: Any, /, *, axes: Any = 2) -> Array: ...

    def tensordot(self, x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
        """Sums of products over axes of two arrays.

        Ragged arrays: The last element axes of a ragged `x1` with the first axes of a dense
        `x2`.

        Parameters
        ----------
        x1
            Ragged or dense array.
        x2
            Dense array.
        axes
            Number of axes, or the axes of each array.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.tensordot(xp.expand_dims(x, axis=2), xp.ones((1, 3)), axes=1).shape
        (2, None, 3)
        """
        raise NotImplementedError

    def trace(self, x: T, /, *, offset: int = 0, dtype: Any = None) -> T:
        """Sum of the diagonal of each matrix.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        offset
            Diagonal: 0 is the main one, positive ones are above.
        dtype
            Data type of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> m = scree.from_lists([[[[2.0, 1.0], [1.0, 2.0]]]])
        >>> xp.linalg.trace(m).tolist()
        [[4.0]]
        """
        raise NotImplementedError

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """Dot products of vectors.

        Ragged arrays: Along the ragged axis one product per row, a dense array; along an
        element axis a ragged array.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Dense if `axis` is the ragged axis, else ragged if an argument is.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.vecdot(x, y, axis=1)
        array([ 3., 20.])
        """
        raise NotImplementedError

    def vector_norm(
        self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False, ord: float = 2
    ) -> Any:
        """Norm of vectors.

        Ragged arrays: Along the ragged axis one norm per row, a dense array; along element axes
        a ragged array.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.
        ord
            Order of the norm.

        Returns
        -------
        array
            Dense if `axis` is the ragged axis or None, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.linalg.vector_norm(x, axis=1).round(2)
        array([2.24, 4.  ])
        """
        raise NotImplementedError


class Fft(Protocol):
    """The type of `xp.fft`, an extension of the standard."""

    def fft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Discrete Fourier transform.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the transform; by default the size of the axis.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def fftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
        """Frequencies of `fft`.

        It is the library's own function.
        """
        raise NotImplementedError

    def fftn(
        self,
        x: Any,
        /,
        *,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: str = "backward",
    ) -> Any:
        """Discrete Fourier transform over several axes.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        s
            Length of the transform along each axis.
        axes
            Axes of the transform; by default all of them.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def fftshift(self, x: Any, /, *, axes: Axes = None) -> Any:
        """Move the frequency 0 to the middle.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        axes
            Axes to shift; by default all of them.

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def hfft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Discrete Fourier transform of a signal with Hermitian symmetry.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the result; by default 2 * (m - 1) for an axis of size m.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def ifft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Inverse of `fft`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the transform; by default the size of the axis.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def ifftn(
        self,
        x: Any,
        /,
        *,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: str = "backward",
    ) -> Any:
        """Inverse of `fftn`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        s
            Length of the transform along each axis.
        axes
            Axes of the transform; by default all of them.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def ifftshift(self, x: Any, /, *, axes: Axes = None) -> Any:
        """Inverse of `fftshift`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        axes
            Axes to shift; by default all of them.

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def ihfft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Inverse of `hfft`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the transform; by default the size of the axis.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def irfft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Inverse of `rfft`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the result; by default 2 * (m - 1) for an axis of size m.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def irfftn(
        self,
        x: Any,
        /,
        *,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: str = "backward",
    ) -> Any:
        """Inverse of `rfftn`.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        s
            Length of the transform along each axis.
        axes
            Axes of the transform; by default all of them.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def rfft(
        self, x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
    ) -> Any:
        """Discrete Fourier transform of real numbers.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        n
            Length of the transform; by default the size of the axis.
        axis
            Axis of the transform.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def rfftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
        """Frequencies of `rfft`.

        It is the library's own function.
        """
        raise NotImplementedError

    def rfftn(
        self,
        x: Any,
        /,
        *,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: str = "backward",
    ) -> Any:
        """Discrete Fourier transform of real numbers over several axes.

        It takes no ragged arrays: a transform over rows of different lengths has no common
        frequencies; use scree.unpack, or arr.values for elements.

        Parameters
        ----------
        x
            Ragged or dense array.
        s
            Length of the transform along each axis.
        axes
            Axes of the transform; by default all of them.
        norm
            Place of the factor 1/n: "backward", "ortho" or "forward".

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError


class Namespace(Protocol):
    """The type of `scree.namespace`: the Array API standard for ragged and dense arrays.

    It annotates a namespace that a function takes as an argument.

    Examples
    --------
    >>> import scree, scree.xp.numpy
    >>> def normalized(xp: scree.Namespace, x: scree.Array) -> scree.Array:
    ...     return x / xp.sum(x, axis=1, keepdims=True)
    >>> normalized(scree.xp.numpy, scree.from_lists([[1.0, 3.0]])).tolist()
    [[0.25, 0.75]]
    """

    fft: Fft
    linalg: Linalg
    ragged: Ragged
    __array_api_version__: Any
    bool: Any
    complex128: Any
    complex64: Any
    e: float
    float32: Any
    float64: Any
    inf: float
    int16: Any
    int32: Any
    int64: Any
    int8: Any
    nan: float
    newaxis: None
    pi: float
    uint16: Any
    uint32: Any
    uint64: Any
    uint8: Any

    def __array_namespace_info__(self) -> Any:
        """Description of the namespace: devices, default data types, capabilities.

        It is the library's own function.
        """
        raise NotImplementedError

    def abs(self, x: T, /) -> T:
        """Absolute value.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.abs(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def acos(self, x: T, /) -> T:
        """Inverse cosine, in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.acos(xp.minimum(x, 1.0)).tolist()
        [[0.0, 0.0], [0.0]]
        """
        raise NotImplementedError

    def acosh(self, x: T, /) -> T:
        """Inverse hyperbolic cosine.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.acosh(x).values.round(2)
        array([0.  , 1.32, 2.06])
        """
        raise NotImplementedError

    @overload
    def add(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def add(self, x1: Any, x2: Any, /) -> Array: ...

    def add(self, x1: Any, x2: Any, /) -> Any:
        """The sum of two elements.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.add(x, y).tolist()
        [[4.0, 2.0], [9.0]]
        """
        raise NotImplementedError

    def all(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """Test whether all elements are true; an empty row gives True.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.all(x > 1, axis=1)
        array([False,  True])
        """
        raise NotImplementedError

    def any(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """Test whether any element is true; an empty row gives False.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.any(x > 3, axis=1)
        array([False,  True])
        """
        raise NotImplementedError

    def arange(
        self,
        start: float,
        /,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        """Evenly spaced numbers in a half-open interval.

        It is the library's own function.
        """
        raise NotImplementedError

    def argmax(self, x: Any, /, *, axis: int | None = None, keepdims: Flag = False) -> Any:
        """The position of the first largest element.

        Ragged arrays: Along the ragged axis the result is the position in the row, -1 for an
        empty row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if `axis` is the ragged axis or None, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.argmax(x, axis=1)
        array([1, 0])
        """
        raise NotImplementedError

    def argmin(self, x: Any, /, *, axis: int | None = None, keepdims: Flag = False) -> Any:
        """The position of the first smallest element.

        Ragged arrays: Along the ragged axis the result is the position in the row, -1 for an
        empty row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if `axis` is the ragged axis or None, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.argmin(x, axis=1)
        array([0, 0])
        """
        raise NotImplementedError

    def argsort(
        self, x: T, /, *, axis: int = -1, descending: Flag = False, stable: Flag = True
    ) -> T:
        """The order that sorts.

        Ragged arrays: Along the ragged axis the result holds positions in the row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        descending
            Sort from the largest to the smallest.
        stable
            Keep the order of equal elements.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.argsort(y, axis=1).tolist()
        [[1, 0], [0]]
        """
        raise NotImplementedError

    def asarray(
        self, obj: Any, /, *, dtype: Any = None, device: Any = None, copy: Flag | None = None
    ) -> Any:
        """An array of numbers, sequences or another array.

        Ragged arrays: A ragged array is returned itself, unless the dtype, the device or `copy`
        asks for other values.

        Parameters
        ----------
        obj
            Number, nested sequence, or ragged or dense array.
        dtype
            Data type of the result.
        device
            Device of the result.
        copy
            True always copies, False never; None copies only where it is necessary.

        Returns
        -------
        array
            Ragged if `obj` is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.asarray(x) is x, xp.asarray(x, dtype=xp.int64).tolist()
        (True, [[1, 2], [4]])
        """
        raise NotImplementedError

    def asin(self, x: T, /) -> T:
        """Inverse sine, in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.asin(x - x).tolist()
        [[0.0, 0.0], [0.0]]
        """
        raise NotImplementedError

    def asinh(self, x: T, /) -> T:
        """Inverse hyperbolic sine.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.asinh(x).values.round(2)
        array([0.88, 1.44, 2.09])
        """
        raise NotImplementedError

    def astype(self, x: T, dtype: Any, /, *, copy: Flag = True, device: Any = None) -> T:
        """The array in another data type.

        Ragged arrays: The result has the layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        dtype
            Data type of the result.
        copy
            True always copies, False never; None copies only where it is necessary.
        device
            Device of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.astype(x, xp.int64).tolist()
        [[1, 2], [4]]
        """
        raise NotImplementedError

    def atan(self, x: T, /) -> T:
        """Inverse tangent, in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.atan(x).values.round(2)
        array([0.79, 1.11, 1.33])
        """
        raise NotImplementedError

    @overload
    def atan2(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def atan2(self, x1: Any, x2: Any, /) -> Array: ...

    def atan2(self, x1: Any, x2: Any, /) -> Any:
        """The angle of the point (x2, x1), in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.atan2(x, y).values.round(2)
        array([0.32, 1.57, 0.67])
        """
        raise NotImplementedError

    def atanh(self, x: T, /) -> T:
        """Inverse hyperbolic tangent.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.atanh(x - x).tolist()
        [[0.0, 0.0], [0.0]]
        """
        raise NotImplementedError

    @overload
    def bitwise_and(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def bitwise_and(self, x1: Any, x2: Any, /) -> Array: ...

    def bitwise_and(self, x1: Any, x2: Any, /) -> Any:
        """Bitwise AND.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_and(scree.from_lists([[1, 2], [7]]), 3).tolist()
        [[1, 2], [3]]
        """
        raise NotImplementedError

    def bitwise_invert(self, x: T, /) -> T:
        """Bits inverted.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_invert(scree.from_lists([[1, 2], [4]])).tolist()
        [[-2, -3], [-5]]
        """
        raise NotImplementedError

    @overload
    def bitwise_left_shift(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def bitwise_left_shift(self, x1: Any, x2: Any, /) -> Array: ...

    def bitwise_left_shift(self, x1: Any, x2: Any, /) -> Any:
        """The bits of `x1` moved left by `x2` places.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_left_shift(scree.from_lists([[1, 2], [7]]), 1).tolist()
        [[2, 4], [14]]
        """
        raise NotImplementedError

    @overload
    def bitwise_or(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def bitwise_or(self, x1: Any, x2: Any, /) -> Array: ...

    def bitwise_or(self, x1: Any, x2: Any, /) -> Any:
        """Bitwise OR.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_or(scree.from_lists([[1, 2], [7]]), 1).tolist()
        [[1, 3], [7]]
        """
        raise NotImplementedError

    @overload
    def bitwise_right_shift(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def bitwise_right_shift(self, x1: Any, x2: Any, /) -> Array: ...

    def bitwise_right_shift(self, x1: Any, x2: Any, /) -> Any:
        """The bits of `x1` moved right by `x2` places.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_right_shift(scree.from_lists([[1, 2], [7]]), 1).tolist()
        [[0, 1], [3]]
        """
        raise NotImplementedError

    @overload
    def bitwise_xor(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def bitwise_xor(self, x1: Any, x2: Any, /) -> Array: ...

    def bitwise_xor(self, x1: Any, x2: Any, /) -> Any:
        """Bitwise XOR.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.bitwise_xor(scree.from_lists([[1, 2], [7]]), 3).tolist()
        [[2, 1], [4]]
        """
        raise NotImplementedError

    def broadcast_arrays(self, *arrays: Any) -> tuple[Any, ...]:
        """Broadcast arrays against each other.

        Ragged arrays: Dense arrays take the layout of the ragged ones, which must share it;
        element axes are broadcast too.

        Parameters
        ----------
        *arrays
            Ragged or dense arrays.

        Returns
        -------
        sequence of arrays
            One per argument; ragged if an argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> [a.tolist() for a in xp.broadcast_arrays(x, xp.asarray(9.0))]
        [[[1.0, 2.0], [4.0]], [[9.0, 9.0], [9.0]]]
        """
        raise NotImplementedError

    def broadcast_shapes(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that arrays of these shapes have together.

        It is the library's own function.
        """
        raise NotImplementedError

    def broadcast_to(self, x: T, /, shape: Any) -> T:
        """Broadcast an array to a shape.

        Ragged arrays: The shape is ``(n, None, ...)``; element axes of size 1 are broadcast.

        Parameters
        ----------
        x
            Ragged or dense array.
        shape
            The shape; None marks the ragged axis.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.broadcast_to(xp.expand_dims(x, axis=2), (2, None, 3)).shape
        (2, None, 3)
        """
        raise NotImplementedError

    def can_cast(self, from_: Any, to: Any, /) -> Flag:
        """Test whether the standard allows a conversion between data types.

        Ragged arrays: A ragged array counts as its dtype.

        Parameters
        ----------
        from_
            Data type or array.
        to
            Data type.

        Returns
        -------
        bool
            True if the conversion is allowed.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.can_cast(x, xp.float64)
        True
        """
        raise NotImplementedError

    def ceil(self, x: T, /) -> T:
        """The smallest integer that is not below each element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.ceil(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def clip(self, x: T, /, min: Any = None, max: Any = None) -> T:
        """Each element limited to the range from `min` to `max`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        min
            Lower bound, a number or an array; None is no bound.
        max
            Upper bound, a number or an array; None is no bound.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.clip(x, min=1.5, max=3.0).tolist()
        [[1.5, 2.0], [3.0]]
        """
        raise NotImplementedError

    def concat(self, arrays: Sequence[T], /, *, axis: int | None = 0) -> T:
        """Join arrays along an axis.

        Ragged arrays: Axis 0 gives more rows, the ragged axis appends row to row, and an
        element axis needs arrays of one layout.

        Parameters
        ----------
        arrays
            Ragged or dense arrays.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> [xp.concat([x, y], axis=axis).tolist() for axis in (0, 1)]
        [[[1.0, 2.0], [4.0], [3.0, 0.0], [5.0]], [[1.0, 2.0, 3.0, 0.0], [4.0, 5.0]]]
        """
        raise NotImplementedError

    def conj(self, x: T, /) -> T:
        """Complex conjugate.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.conj(scree.from_lists([[1 + 2j], []])).tolist()
        [[(1-2j)], []]
        """
        raise NotImplementedError

    @overload
    def copysign(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def copysign(self, x1: Any, x2: Any, /) -> Array: ...

    def copysign(self, x1: Any, x2: Any, /) -> Any:
        """The magnitude of `x1` with the sign of `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.copysign(x, y).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def cos(self, x: T, /) -> T:
        """Cosine of angles in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.cos(x).values.round(2)
        array([ 0.54, -0.42, -0.65])
        """
        raise NotImplementedError

    def cosh(self, x: T, /) -> T:
        """Hyperbolic cosine.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.cosh(x).values.round(2)
        array([ 1.54,  3.76, 27.31])
        """
        raise NotImplementedError

    def count_nonzero(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """The number of elements that are not 0.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.count_nonzero(y, axis=1)
        array([1, 1])
        """
        raise NotImplementedError

    def cumulative_prod(
        self, x: T, /, *, axis: int | None = None, dtype: Any = None, include_initial: Flag = False
    ) -> T:
        """Running products.

        Ragged arrays: Along the ragged axis the result starts again in each row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        dtype
            Data type of the result.
        include_initial
            Start with the value of an empty sum or product.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.cumulative_prod(x, axis=1).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def cumulative_sum(
        self, x: T, /, *, axis: int | None = None, dtype: Any = None, include_initial: Flag = False
    ) -> T:
        """Running sums.

        Ragged arrays: Along the ragged axis the result starts again in each row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        dtype
            Data type of the result.
        include_initial
            Start with the value of an empty sum or product.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.cumulative_sum(x, axis=1).tolist()
        [[1.0, 3.0], [4.0]]
        """
        raise NotImplementedError

    def diff(
        self, x: T, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
    ) -> T:
        """Differences of neighbors.

        Ragged arrays: Along the ragged axis each row becomes shorter by `n`, and at least
        empty.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        n
            How often to apply it.
        prepend
            Array to put before `x`.
        append
            Array to put after `x`.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.diff(x, axis=1).tolist()
        [[1.0], []]
        """
        raise NotImplementedError

    @overload
    def divide(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def divide(self, x1: Any, x2: Any, /) -> Array: ...

    def divide(self, x1: Any, x2: Any, /) -> Any:
        """`x1` divided by `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.divide(y, x).tolist()
        [[3.0, 0.0], [1.25]]
        """
        raise NotImplementedError

    def empty(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
        """A dense array with any values.

        It is the library's own function.
        """
        raise NotImplementedError

    def empty_like(self, x: T, /, *, dtype: Any = None, device: Any = None) -> T:
        """An array like `x` with any values.

        Ragged arrays: The result has the layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        dtype
            Data type of the result.
        device
            Device of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.empty_like(x).shape
        (2, None)
        """
        raise NotImplementedError

    @overload
    def equal(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def equal(self, x1: Any, x2: Any, /) -> Array: ...

    def equal(self, x1: Any, x2: Any, /) -> Any:
        """Test whether the elements are equal.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.equal(x, y).tolist()
        [[False, False], [False]]
        """
        raise NotImplementedError

    def exp(self, x: T, /) -> T:
        """Exponential.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.exp(x).values.round(2)
        array([ 2.72,  7.39, 54.6 ])
        """
        raise NotImplementedError

    def expand_dims(self, x: T, /, axis: int | tuple[int, ...]) -> T:
        """Insert axes of size 1.

        Ragged arrays: New axes come after the batch.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Places of the new axes in the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.expand_dims(x, axis=2).shape
        (2, None, 1)
        """
        raise NotImplementedError

    def expm1(self, x: T, /) -> T:
        """Exponential minus 1, accurate near 0.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.expm1(x).values.round(2)
        array([ 1.72,  6.39, 53.6 ])
        """
        raise NotImplementedError

    def eye(
        self,
        n_rows: int,
        n_cols: int | None = None,
        /,
        *,
        k: int = 0,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        """Ones on a diagonal, zeros elsewhere.

        It is the library's own function.
        """
        raise NotImplementedError

    def finfo(self, type: Any, /) -> Any:
        """Limits of a floating-point data type.

        It is the library's own function.
        """
        raise NotImplementedError

    def flip(self, x: T, /, *, axis: Axes = None) -> T:
        """Reverse the order along axes.

        Ragged arrays: Axis 0 reverses the rows, the ragged axis the tokens of each row.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.flip(x, axis=1).tolist()
        [[2.0, 1.0], [4.0]]
        """
        raise NotImplementedError

    def floor(self, x: T, /) -> T:
        """The largest integer that is not above each element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.floor(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    @overload
    def floor_divide(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def floor_divide(self, x1: Any, x2: Any, /) -> Array: ...

    def floor_divide(self, x1: Any, x2: Any, /) -> Any:
        """`x1` divided by `x2`, rounded down.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.floor_divide(y, x).tolist()
        [[3.0, 0.0], [1.0]]
        """
        raise NotImplementedError

    def from_dlpack(self, x: Any, /, *, device: Any = None, copy: Flag | None = None) -> Any:
        """A dense array of an object with ``__dlpack__``.

        It takes no ragged arrays: rows of different lengths are not a dense array; use
        arr.values, scree.unpack or scree.to_padded.

        Parameters
        ----------
        x
            Object with ``__dlpack__``.
        device
            Device of the result.
        copy
            True always copies, False never; None copies only where it is necessary.

        Returns
        -------
        array
            Dense.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def full(
        self, shape: Any, fill_value: complex, *, dtype: Any = None, device: Any = None
    ) -> Any:
        """A dense array of one value.

        It is the library's own function.
        """
        raise NotImplementedError

    def full_like(
        self, x: T, /, fill_value: complex, *, dtype: Any = None, device: Any = None
    ) -> T:
        """An array like `x` of one value.

        Ragged arrays: The result has the layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        fill_value
            Number.
        dtype
            Data type of the result.
        device
            Device of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.full_like(x, 7.0).tolist()
        [[7.0, 7.0], [7.0]]
        """
        raise NotImplementedError

    @overload
    def greater(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def greater(self, x1: Any, x2: Any, /) -> Array: ...

    def greater(self, x1: Any, x2: Any, /) -> Any:
        """Test whether `x1` is greater than `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.greater(x, y).tolist()
        [[False, True], [False]]
        """
        raise NotImplementedError

    @overload
    def greater_equal(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def greater_equal(self, x1: Any, x2: Any, /) -> Array: ...

    def greater_equal(self, x1: Any, x2: Any, /) -> Any:
        """Test whether `x1` is greater than or equal to `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.greater_equal(x, y).tolist()
        [[False, True], [False]]
        """
        raise NotImplementedError

    @overload
    def hypot(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def hypot(self, x1: Any, x2: Any, /) -> Array: ...

    def hypot(self, x1: Any, x2: Any, /) -> Any:
        """The square root of the sum of squares, without overflow.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.hypot(x, y).values.round(2)
        array([3.16, 2.  , 6.4 ])
        """
        raise NotImplementedError

    def iinfo(self, type: Any, /) -> Any:
        """Limits of an integer data type.

        It is the library's own function.
        """
        raise NotImplementedError

    def imag(self, x: T, /) -> T:
        """Imaginary part.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.imag(scree.from_lists([[1 + 2j], []])).tolist()
        [[2.0], []]
        """
        raise NotImplementedError

    def isdtype(self, dtype: Any, kind: Any) -> Flag:
        """Test whether a data type is of a kind.

        It is the library's own function.
        """
        raise NotImplementedError

    def isfinite(self, x: T, /) -> T:
        """Test whether each element is neither infinite nor NaN.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.isfinite(x).tolist()
        [[True, True], [True]]
        """
        raise NotImplementedError

    def isin(self, x1: T, x2: Any, /, *, invert: Flag = False) -> T:
        """Test whether each element of `x1` is among the elements of `x2`.

        Ragged arrays: The result has the layout of `x1`. All tokens of a ragged `x2` count,
        whatever their row.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number: the values to look for.
        invert
            Test for absence.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.isin(x, xp.asarray([1.0, 4.0])).tolist()
        [[True, False], [True]]
        """
        raise NotImplementedError

    def isinf(self, x: T, /) -> T:
        """Test whether each element is infinite.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.isinf(x).tolist()
        [[False, False], [False]]
        """
        raise NotImplementedError

    def isnan(self, x: T, /) -> T:
        """Test whether each element is NaN.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.isnan(x).tolist()
        [[False, False], [False]]
        """
        raise NotImplementedError

    @overload
    def less(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def less(self, x1: Any, x2: Any, /) -> Array: ...

    def less(self, x1: Any, x2: Any, /) -> Any:
        """Test whether `x1` is less than `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.less(x, y).tolist()
        [[True, False], [True]]
        """
        raise NotImplementedError

    @overload
    def less_equal(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def less_equal(self, x1: Any, x2: Any, /) -> Array: ...

    def less_equal(self, x1: Any, x2: Any, /) -> Any:
        """Test whether `x1` is less than or equal to `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.less_equal(x, y).tolist()
        [[True, False], [True]]
        """
        raise NotImplementedError

    def linspace(
        self,
        start: complex,
        stop: complex,
        /,
        num: int,
        *,
        dtype: Any = None,
        device: Any = None,
        endpoint: Flag = True,
    ) -> Any:
        """A number of evenly spaced numbers.

        It is the library's own function.
        """
        raise NotImplementedError

    def log(self, x: T, /) -> T:
        """Natural logarithm.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.log(x).values.round(2)
        array([0.  , 0.69, 1.39])
        """
        raise NotImplementedError

    def log10(self, x: T, /) -> T:
        """Logarithm to base 10.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.log10(x).values.round(2)
        array([0. , 0.3, 0.6])
        """
        raise NotImplementedError

    def log1p(self, x: T, /) -> T:
        """Natural logarithm of 1 plus each element, accurate near 0.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.log1p(x).values.round(2)
        array([0.69, 1.1 , 1.61])
        """
        raise NotImplementedError

    def log2(self, x: T, /) -> T:
        """Logarithm to base 2.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.log2(x).tolist()
        [[0.0, 1.0], [2.0]]
        """
        raise NotImplementedError

    @overload
    def logaddexp(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def logaddexp(self, x1: Any, x2: Any, /) -> Array: ...

    def logaddexp(self, x1: Any, x2: Any, /) -> Any:
        """The logarithm of the sum of exponentials, without overflow.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.logaddexp(x, y).values.round(2)
        array([3.13, 2.13, 5.31])
        """
        raise NotImplementedError

    @overload
    def logical_and(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def logical_and(self, x1: Any, x2: Any, /) -> Array: ...

    def logical_and(self, x1: Any, x2: Any, /) -> Any:
        """Test whether both elements are true.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.logical_and(x > 1, y > 1).tolist()
        [[False, False], [True]]
        """
        raise NotImplementedError

    def logical_not(self, x: T, /) -> T:
        """Test whether each element is false.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.logical_not(x > 1).tolist()
        [[True, False], [False]]
        """
        raise NotImplementedError

    @overload
    def logical_or(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def logical_or(self, x1: Any, x2: Any, /) -> Array: ...

    def logical_or(self, x1: Any, x2: Any, /) -> Any:
        """Test whether one of the elements is true.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.logical_or(x > 1, y > 1).tolist()
        [[True, True], [True]]
        """
        raise NotImplementedError

    @overload
    def logical_xor(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def logical_xor(self, x1: Any, x2: Any, /) -> Array: ...

    def logical_xor(self, x1: Any, x2: Any, /) -> Any:
        """Test whether exactly one of the elements is true.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.logical_xor(x > 1, y > 1).tolist()
        [[True, True], [False]]
        """
        raise NotImplementedError

    @overload
    def matmul(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def matmul(self, x1: Any, x2: Any, /) -> Array: ...

    def matmul(self, x1: Any, x2: Any, /) -> Any:
        """Matrix product.

        Ragged arrays: ``(n, None, ..., k) @ (k, m)`` multiplies each token, ``(n, None, k) @
        (n, k, m)`` each row by its own matrix.

        Parameters
        ----------
        x1
            Ragged or dense array.
        x2
            Dense array (k, m), (k,) or (n, k, m).

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.matmul(xp.expand_dims(x, axis=2), xp.ones((1, 2))).shape
        (2, None, 2)
        """
        raise NotImplementedError

    def matrix_transpose(self, x: T, /) -> T:
        """Swap the last two axes.

        Ragged arrays: One of them may be the ragged axis.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.matrix_transpose(xp.expand_dims(x, axis=2)).shape
        (2, 1, None)
        """
        raise NotImplementedError

    def max(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """The largest element; an empty row gives the lowest value of the dtype, -inf for floats.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.max(x, axis=1)
        array([2., 4.])
        """
        raise NotImplementedError

    @overload
    def maximum(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def maximum(self, x1: Any, x2: Any, /) -> Array: ...

    def maximum(self, x1: Any, x2: Any, /) -> Any:
        """The larger element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.maximum(x, y).tolist()
        [[3.0, 2.0], [5.0]]
        """
        raise NotImplementedError

    def mean(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """The mean; an empty row gives NaN, with gradient 0.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.mean(x, axis=1)
        array([1.5, 4. ])
        """
        raise NotImplementedError

    def meshgrid(self, *arrays: Any, indexing: str = "xy") -> tuple[Any, ...]:
        """Coordinate matrices of coordinate vectors.

        It takes no ragged arrays: rows of different lengths are not a dense array; use
        arr.values, scree.unpack or scree.to_padded.

        Parameters
        ----------
        *arrays
            Vectors.
        indexing
            "xy" or "ij".

        Returns
        -------
        tuple of arrays
            Dense arrays, one per argument.

        Raises
        ------
        TypeError
            If an argument is ragged.
        """
        raise NotImplementedError

    def min(self, x: Any, /, *, axis: Axes = None, keepdims: Flag = False) -> Any:
        """The smallest element; an empty row gives the highest value of the dtype, inf for floats.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.min(x, axis=1)
        array([1., 4.])
        """
        raise NotImplementedError

    @overload
    def minimum(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def minimum(self, x1: Any, x2: Any, /) -> Array: ...

    def minimum(self, x1: Any, x2: Any, /) -> Any:
        """The smaller element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.minimum(x, y).tolist()
        [[1.0, 0.0], [4.0]]
        """
        raise NotImplementedError

    def moveaxis(
        self, x: T, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
    ) -> T:
        """Move axes to other places.

        Ragged arrays: The batch stays first.

        Parameters
        ----------
        x
            Ragged or dense array.
        source
            Axes to move.
        destination
            Places of these axes in the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.moveaxis(xp.expand_dims(x, axis=2), 2, 1).shape
        (2, 1, None)
        """
        raise NotImplementedError

    @overload
    def multiply(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def multiply(self, x1: Any, x2: Any, /) -> Array: ...

    def multiply(self, x1: Any, x2: Any, /) -> Any:
        """The product of two elements.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.multiply(x, y).tolist()
        [[3.0, 0.0], [20.0]]
        """
        raise NotImplementedError

    def negative(self, x: T, /) -> T:
        """Each element with the other sign.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.negative(x).tolist()
        [[-1.0, -2.0], [-4.0]]
        """
        raise NotImplementedError

    @overload
    def nextafter(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def nextafter(self, x1: Any, x2: Any, /) -> Array: ...

    def nextafter(self, x1: Any, x2: Any, /) -> Any:
        """The next number after `x1` in the direction of `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> (xp.nextafter(x, y) > x).tolist()
        [[True, False], [True]]
        """
        raise NotImplementedError

    def nonzero(self, x: Any, /) -> tuple[Any, ...]:
        """The indices of the elements that are not 0.

        Ragged arrays: One dense array per axis: the row, the position in the row, and the
        element's indices.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        tuple of dense arrays
            One array of indices per axis of `x`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.nonzero(y)
        (array([0, 1]), array([0, 0]))
        """
        raise NotImplementedError

    @overload
    def not_equal(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def not_equal(self, x1: Any, x2: Any, /) -> Array: ...

    def not_equal(self, x1: Any, x2: Any, /) -> Any:
        """Test whether the elements differ.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.not_equal(x, y).tolist()
        [[True, True], [True]]
        """
        raise NotImplementedError

    def ones(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
        """A dense array of ones.

        It is the library's own function.
        """
        raise NotImplementedError

    def ones_like(self, x: T, /, *, dtype: Any = None, device: Any = None) -> T:
        """An array like `x` of ones.

        Ragged arrays: The result has the layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        dtype
            Data type of the result.
        device
            Device of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.ones_like(x).tolist()
        [[1.0, 1.0], [1.0]]
        """
        raise NotImplementedError

    def permute_dims(self, x: T, /, axes: tuple[int, ...]) -> T:
        """Reorder the axes.

        Ragged arrays: The batch stays first.

        Parameters
        ----------
        x
            Ragged or dense array.
        axes
            The order of the axes.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.permute_dims(xp.expand_dims(x, axis=2), (0, 2, 1)).shape
        (2, 1, None)
        """
        raise NotImplementedError

    def positive(self, x: T, /) -> T:
        """Each element unchanged.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.positive(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    @overload
    def pow(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def pow(self, x1: Any, x2: Any, /) -> Array: ...

    def pow(self, x1: Any, x2: Any, /) -> Any:
        """`x1` to the power of `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.pow(x, 2).tolist()
        [[1.0, 4.0], [16.0]]
        """
        raise NotImplementedError

    def prod(
        self, x: Any, /, *, axis: Axes = None, dtype: Any = None, keepdims: Flag = False
    ) -> Any:
        """The product; an empty row gives 1.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        dtype
            Data type of the result.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.prod(x, axis=1)
        array([2., 4.])
        """
        raise NotImplementedError

    def real(self, x: T, /) -> T:
        """Real part.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.real(scree.from_lists([[1 + 2j], []])).tolist()
        [[1.0], []]
        """
        raise NotImplementedError

    def reciprocal(self, x: T, /) -> T:
        """1 divided by each element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.reciprocal(x).tolist()
        [[1.0, 0.5], [0.25]]
        """
        raise NotImplementedError

    @overload
    def remainder(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def remainder(self, x1: Any, x2: Any, /) -> Array: ...

    def remainder(self, x1: Any, x2: Any, /) -> Any:
        """The remainder of the division, with the sign of `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.remainder(y, x).tolist()
        [[0.0, 0.0], [1.0]]
        """
        raise NotImplementedError

    def repeat(self, x: T, repeats: Any, /, *, axis: int | None = None) -> T:
        """Repeat entries of an axis.

        Ragged arrays: Axis 0 repeats rows, the ragged axis tokens; a ragged `repeats` has one
        number per token.

        Parameters
        ----------
        x
            Ragged or dense array.
        repeats
            Number of repetitions, or an integer array with one number per entry of the
            axis.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.repeat(x, 2, axis=1).tolist()
        [[1.0, 1.0, 2.0, 2.0], [4.0, 4.0]]
        """
        raise NotImplementedError

    def reshape(self, x: T, /, shape: Any, *, copy: Flag | None = None) -> T:
        """Give an array another shape.

        Ragged arrays: The shape is ``(n, None, ...)``: only the element axes change. ``(-1,)``
        gives the elements of all rows as a dense array.

        Parameters
        ----------
        x
            Ragged or dense array.
        shape
            The shape; None marks the ragged axis.
        copy
            True always copies, False never; None copies only where it is necessary.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.reshape(x, (2, None, 1, 1)).shape
        (2, None, 1, 1)
        """
        raise NotImplementedError

    def result_type(self, *arrays_and_dtypes: Any) -> Any:
        """The data type that these arrays, data types and numbers have together.

        Ragged arrays: A ragged array counts as its dtype.

        Parameters
        ----------
        *arrays_and_dtypes
            Arrays, data types and numbers.

        Returns
        -------
        dtype
            A data type of the library.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.result_type(x, xp.float32)
        dtype('float64')
        """
        raise NotImplementedError

    def roll(self, x: T, /, shift: int | tuple[int, ...], *, axis: Axes = None) -> T:
        """Move entries along axes; what leaves at one end enters at the other.

        Ragged arrays: Axis 0 moves rows, the ragged axis tokens within their row.

        Parameters
        ----------
        x
            Ragged or dense array.
        shift
            Number of places, towards higher positions.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.roll(x, 1, axis=1).tolist()
        [[2.0, 1.0], [4.0]]
        """
        raise NotImplementedError

    def round(self, x: T, /) -> T:
        """The nearest integer, the even one of two.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.round(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def searchsorted(self, x1: Any, x2: T, /, *, side: str = "left", sorter: Any = None) -> T:
        """The indices at which the elements of `x2` keep a sorted `x1` in order.

        Ragged arrays: `x1` is one sorted dense array; the result has the layout of `x2`.

        Parameters
        ----------
        x1
            Sorted dense array (k,).
        x2
            Ragged or dense array.
        side
            Place among equal entries: "left" or "right".
        sorter
            Indices that sort `x1`.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.searchsorted(xp.asarray([0.0, 2.0, 3.0]), x).tolist()
        [[1, 1], [3]]
        """
        raise NotImplementedError

    def sign(self, x: T, /) -> T:
        """-1, 0 or 1, the sign of each element.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.sign(x).tolist()
        [[1.0, 1.0], [1.0]]
        """
        raise NotImplementedError

    def signbit(self, x: T, /) -> T:
        """Test whether the sign bit is set: true for -0.0 too.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.signbit(x).tolist()
        [[False, False], [False]]
        """
        raise NotImplementedError

    def sin(self, x: T, /) -> T:
        """Sine of angles in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.sin(x).values.round(2)
        array([ 0.84,  0.91, -0.76])
        """
        raise NotImplementedError

    def sinh(self, x: T, /) -> T:
        """Hyperbolic sine.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.sinh(x).values.round(2)
        array([ 1.18,  3.63, 27.29])
        """
        raise NotImplementedError

    def sort(self, x: T, /, *, axis: int = -1, descending: Flag = False, stable: Flag = True) -> T:
        """The elements in order.

        Ragged arrays: Along the ragged axis each row is sorted.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        descending
            Sort from the largest to the smallest.
        stable
            Keep the order of equal elements.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.sort(y, axis=1).tolist()
        [[0.0, 3.0], [5.0]]
        """
        raise NotImplementedError

    def sqrt(self, x: T, /) -> T:
        """Square root.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.sqrt(x).values.round(2)
        array([1.  , 1.41, 2.  ])
        """
        raise NotImplementedError

    def square(self, x: T, /) -> T:
        """Each element times itself.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.square(x).tolist()
        [[1.0, 4.0], [16.0]]
        """
        raise NotImplementedError

    def squeeze(self, x: T, /, axis: int | tuple[int, ...]) -> T:
        """Remove axes of size 1.

        Ragged arrays: Only element axes can be removed.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.squeeze(xp.expand_dims(x, axis=2), axis=2).shape
        (2, None)
        """
        raise NotImplementedError

    def stack(self, arrays: Sequence[T], /, *, axis: int = 0) -> T:
        """Join arrays along a new axis.

        Ragged arrays: The new axis is an element axis, and the arrays share a layout.

        Parameters
        ----------
        arrays
            Ragged or dense arrays.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.stack([x, y], axis=2).shape
        (2, None, 2)
        """
        raise NotImplementedError

    def std(
        self, x: Any, /, *, axis: Axes = None, correction: float = 0.0, keepdims: Flag = False
    ) -> Any:
        """The standard deviation; an empty row gives NaN, with gradient 0.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        correction
            Degrees of freedom to subtract from the number of elements; 1 for the sample
            variance.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.std(x, axis=1)
        array([0.5, 0. ])
        """
        raise NotImplementedError

    @overload
    def subtract(self, x1: DenseArray | complex, x2: DenseArray | complex, /) -> Any: ...

    @overload
    def subtract(self, x1: Any, x2: Any, /) -> Array: ...

    def subtract(self, x1: Any, x2: Any, /) -> Any:
        """`x1` minus `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.subtract(x, y).tolist()
        [[-2.0, 2.0], [-1.0]]
        """
        raise NotImplementedError

    def sum(
        self, x: Any, /, *, axis: Axes = None, dtype: Any = None, keepdims: Flag = False
    ) -> Any:
        """The sum; an empty row gives 0.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        dtype
            Data type of the result.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.sum(x, axis=1)
        array([3., 4.])
        """
        raise NotImplementedError

    def take(self, x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
        """Entries of an axis by their positions.

        Ragged arrays: Ragged `indices` look up rows of a dense table, as an embedding does;
        dense ones take rows (axis 0) or entries of an element axis of a ragged `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        indices
            Integer array of positions.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if `x` or `indices` are, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.take(xp.asarray([10, 20, 30]), scree.from_lists([[0, 2], [1]]), axis=0).tolist()
        [[10, 30], [20]]
        """
        raise NotImplementedError

    def take_along_axis(self, x: T, indices: Any, /, *, axis: int = -1) -> T:
        """One entry per position in `indices`.

        Ragged arrays: Along the ragged axis `indices` are ragged and hold positions in the same
        row.

        Parameters
        ----------
        x
            Ragged or dense array.
        indices
            Integer array of positions.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.take_along_axis(x, scree.from_lists([[1], [0]]), axis=1).tolist()
        [[2.0], [4.0]]
        """
        raise NotImplementedError

    def tan(self, x: T, /) -> T:
        """Tangent of angles in radians.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.tan(x).values.round(2)
        array([ 1.56, -2.19,  1.16])
        """
        raise NotImplementedError

    def tanh(self, x: T, /) -> T:
        """Hyperbolic tangent.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.tanh(x).values.round(2)
        array([0.76, 0.96, 1.  ])
        """
        raise NotImplementedError

    @overload
    def tensordot(
        self, x1: DenseArray | complex, x2: DenseArray | complex, /, *, axes: Any = 2
    ) -> Any: ...

    @overload
    def tensordot(self, x1: Any, x2: Any, /, *, axes: Any = 2) -> Array: ...

    def tensordot(self, x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
        """Sums of products over axes of two arrays.

        Ragged arrays: The last element axes of a ragged `x1` with the first axes of a dense
        `x2`.

        Parameters
        ----------
        x1
            Ragged or dense array.
        x2
            Dense array.
        axes
            Number of axes, or the axes of each array.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.tensordot(xp.expand_dims(x, axis=2), xp.ones((1, 3)), axes=1).shape
        (2, None, 3)
        """
        raise NotImplementedError

    def tile(self, x: T, repetitions: tuple[int, ...], /) -> T:
        """Repeat the array as a block.

        Ragged arrays: Along the ragged axis each row's tokens are repeated, along axis 0 the
        batch.

        Parameters
        ----------
        x
            Ragged or dense array.
        repetitions
            Number of repetitions per axis.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.tile(x, (1, 2)).tolist()
        [[1.0, 2.0, 1.0, 2.0], [4.0, 4.0]]
        """
        raise NotImplementedError

    def tril(self, x: T, /, *, k: int = 0) -> T:
        """The lower triangle of each matrix; zeros elsewhere.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        k
            Diagonal: 0 is the main one, positive ones are above.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.tril(scree.from_lists([[[[1, 2], [3, 4]]]])).tolist()
        [[[[1, 0], [3, 4]]]]
        """
        raise NotImplementedError

    def triu(self, x: T, /, *, k: int = 0) -> T:
        """The upper triangle of each matrix; zeros elsewhere.

        Ragged arrays: It applies to one matrix per token: the last two axes must be element
        axes.

        Parameters
        ----------
        x
            Ragged or dense array.
        k
            Diagonal: 0 is the main one, positive ones are above.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> xp.triu(scree.from_lists([[[[1, 2], [3, 4]]]])).tolist()
        [[[[1, 2], [0, 4]]]]
        """
        raise NotImplementedError

    def trunc(self, x: T, /) -> T:
        """Each element rounded towards 0.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.trunc(x).tolist()
        [[1.0, 2.0], [4.0]]
        """
        raise NotImplementedError

    def unique_all(self, x: Any, /) -> Any:
        """The distinct values, their first indices, their inverse and their counts.

        Ragged arrays: The values of all rows together, as dense arrays; the inverse has the
        layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `values`, `indices`, `inverse_indices` and `counts`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.unique_all(x).counts
        array([1, 1, 1])
        """
        raise NotImplementedError

    def unique_counts(self, x: Any, /) -> Any:
        """The distinct values and how often each occurs.

        Ragged arrays: The values of all rows together, as dense arrays.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `values` and `counts`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.unique_counts(x).values
        array([1., 2., 4.])
        """
        raise NotImplementedError

    def unique_inverse(self, x: Any, /) -> Any:
        """The distinct values, and the index of each element among them.

        Ragged arrays: The values of all rows together, a dense array; the inverse has the
        layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        named tuple
            `values` and `inverse_indices`.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.unique_inverse(x).inverse_indices.tolist()
        [[0, 1], [2]]
        """
        raise NotImplementedError

    def unique_values(self, x: Any, /) -> Any:
        """The distinct values.

        Ragged arrays: The values of all rows together, a dense array.

        Parameters
        ----------
        x
            Ragged or dense array.

        Returns
        -------
        array
            Dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.unique_values(x)
        array([1., 2., 4.])
        """
        raise NotImplementedError

    def unstack(self, x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
        """The entries of an axis.

        Ragged arrays: Axis 0 gives the rows as dense arrays, an element axis ragged arrays.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        tuple of arrays
            One per entry of the axis.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.unstack(x)
        (array([1., 2.]), array([4.]))
        """
        raise NotImplementedError

    def var(
        self, x: Any, /, *, axis: Axes = None, correction: float = 0.0, keepdims: Flag = False
    ) -> Any:
        """The variance; an empty row gives NaN, with gradient 0.

        Ragged arrays: `axis=1`, the ragged axis, reduces each row to one entry of a dense array
        (n, ...). `axis=None` reduces all tokens. An element axis gives a ragged array. `axis=0`
        alone raises.

        Parameters
        ----------
        x
            Ragged or dense array.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.
        correction
            Degrees of freedom to subtract from the number of elements; 1 for the sample
            variance.
        keepdims
            Keep the reduced axes, with size 1.

        Returns
        -------
        array
            Dense if the ragged axis or all axes are reduced, else ragged.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.var(x, axis=1)
        array([0.25, 0.  ])
        """
        raise NotImplementedError

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """Dot products of vectors.

        Ragged arrays: Along the ragged axis one product per row, a dense array; along an
        element axis a ragged array.

        Parameters
        ----------
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.
        axis
            Axis; 0 is the batch, and the ragged axis is 1 unless `ragged_dim` moves it.

        Returns
        -------
        array
            Dense if `axis` is the ragged axis, else ragged if an argument is.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.vecdot(x, y, axis=1)
        array([ 3., 20.])
        """
        raise NotImplementedError

    @overload
    def where(
        self, condition: DenseArray | complex, x1: DenseArray | complex, x2: DenseArray | complex, /
    ) -> Any: ...

    @overload
    def where(self, condition: Any, x1: Any, x2: Any, /) -> Array: ...

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any:
        """Choose each element from `x1` or `x2`.

        Ragged arrays: The result has the layout of the ragged operand. Ragged operands must
        share a layout. A dense operand broadcasts: a number, one entry per row with shape (n,
        1, ...), or entries for the element axes.

        Parameters
        ----------
        condition
            Boolean array: where it is true the result is `x1`, elsewhere `x2`.
        x1
            Ragged or dense array, or a number.
        x2
            Ragged or dense array, or a number, broadcast against the other.

        Returns
        -------
        array
            Ragged if an operand is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> y = scree.from_lists([[3.0, 0.0], [5.0]])
        >>> xp.where(x > y, x, y).tolist()
        [[3.0, 2.0], [5.0]]
        """
        raise NotImplementedError

    def zeros(self, shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
        """A dense array of zeros.

        It is the library's own function.
        """
        raise NotImplementedError

    def zeros_like(self, x: T, /, *, dtype: Any = None, device: Any = None) -> T:
        """An array like `x` of zeros.

        Ragged arrays: The result has the layout of `x`.

        Parameters
        ----------
        x
            Ragged or dense array.
        dtype
            Data type of the result.
        device
            Device of the result.

        Returns
        -------
        array
            Ragged if the argument is, else dense.

        Examples
        --------
        >>> import scree, scree.xp.numpy as xp
        >>> x = scree.from_lists([[1.0, 2.0], [4.0]])
        >>> xp.zeros_like(x).tolist()
        [[0.0, 0.0], [0.0]]
        """
        raise NotImplementedError
