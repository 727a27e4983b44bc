"""Code with mistakes that type checkers find: one on every line with the comment "error"."""

# ruff: noqa: B018 (expressions without a use are the mistakes)

import scree
import scree.xp.numpy as xnp

x = scree.from_lists([[1.0, 2.0], [3.0]])
xp = scree.namespace(x)

scree.softmaxx(x)  # error
xp.summ(x)  # error
xp.ragged.softmaxx(x)  # error
xnp.cumsum(x)  # error
x.lengthss  # error
x.sum()  # error
x.at[0].put(1.0)  # error
(x + 1).foo  # error
(x == x).real  # error
x[x > 0].T  # error
xp.exp(x).item()  # error
xp.sum(x, axes=1)  # error
xp.sum(x, axis="rows")  # error
xp.ragged.attention(x, x, x, casual=True)  # error
xp.ragged.softmax()  # error
xp.concat(x)  # error
xp.linalg.nrom(x)  # error
xp.add(x)  # error
scree.from_list([[1.0]])  # error
scree.ragged.attentions(x)  # error
rows: int = x.shape  # error
name: str = scree.unpack(x)  # error
