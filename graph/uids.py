"""The one owner of uids: automatic numbers, and the users' own that take precedence over them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING

from cudnn_jax.graph.errors import GraphValidationError, shown

if TYPE_CHECKING:
    from cudnn_jax.graph.tensor import Tensor

_RULE = "an integer, 0 to 2**63 - 1"


class Uids:
    """The tensors of one graph by uid. A user's uid moves an automatic one away; two users' clash is an error."""

    def __init__(self) -> None:
        self._holders: dict[int, Tensor] = {}
        self._users: set[int] = set()
        self._next = 1

    def __getitem__(self, uid: int) -> Tensor:
        return self._holders[uid]

    def is_users(self, tensor: Tensor) -> bool:
        """Whether the tensor's user asked for its uid."""
        return tensor._uid in self._users

    def restore(self, uids: Iterable[tuple[Tensor, int, bool]]) -> None:
        """Gives every tensor the uid that it had in another process: (tensor, uid, whether it is the user's)."""
        self._holders.clear()
        self._users.clear()
        users = set()
        for tensor, uid, is_users in uids:
            self.claim(tensor, uid)
            users |= {tensor._uid} if is_users else set()
        self._users = users

    def assign(self, tensor: Tensor) -> None:
        """Gives the tensor the next automatic uid."""
        while self._next in self._holders:
            self._next += 1
        self._holders[self._next] = tensor
        tensor._uid = self._next
        self._next += 1

    def claim(self, tensor: Tensor, uid: int) -> None:
        """Gives the tensor the uid that its user wants."""
        if isinstance(uid, bool) or not hasattr(uid, "__index__") or not 0 <= index(uid) < 2**63:
            raise GraphValidationError(f"tensor {tensor.label}: uid is {shown(uid)}; the rule: {_RULE}")
        uid = index(uid)
        holder = self._holders.get(uid)
        if uid in self._users and holder is not tensor:
            assert holder is not None
            raise GraphValidationError(
                f"tensor {tensor.label}: uid {uid} is taken by tensor {holder.label}; the rule: uids are unique"
            )
        if self._holders.get(tensor._uid) is tensor:
            del self._holders[tensor._uid]
            self._users.discard(tensor._uid)
        self._holders[uid] = tensor
        self._users.add(uid)
        tensor._uid = uid
        if holder is not None and holder is not tensor:
            self.assign(holder)
