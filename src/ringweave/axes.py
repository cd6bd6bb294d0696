"""Check the axes, dtypes and devices of tensors, which one line of text states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .checks import INTEGERS
from .errors import RingweaveError, ShapeError, shown
from .types import DTYPES

_KINDS: Final[dict[str, tuple[tuple[torch.dtype, ...], str]]] = {
    "float": (DTYPES, "float32, float16, bfloat16 or float64"),
    "floating": (
        tuple([x for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_floating_point]),
        "a floating type",
    ),
    "int": (INTEGERS, "an integer type"),
    "index": ((torch.int32, torch.int64), "int32 or int64"),
}
# the letters of docstrings, as errors read them out
_MEANINGS: Final = {
    "B": "batch size", "Hq": "number of query heads", "Hkv": "number of key heads", "Nq": "number of queries",
    "Nk": "number of keys", "N": "number of tokens", "D": "head dim", "Dv": "head dim of the values",
    "C": "number of channels",
}  # fmt: skip


# (name, got, wanted, remedy)
_Wrong = tuple[str, object, str, str]


class _Entry(NamedTuple):
    """A tensor of the text.

    Attributes:
        name: Its name.
        dtype: Its dtype as the text states it; empty for any.
        types: The dtypes of a named kind; empty for others.
        axes: Its axes.
        shared: The axes that may have a size of 1 in place of their own.
        optional: The axes that may be left out, the first ones first.
    """

    name: str
    dtype: str
    types: tuple[torch.dtype, ...]
    axes: tuple[str, ...]
    shared: frozenset[str]
    optional: tuple[str, ...]

    def without(self, count: int) -> tuple[str, ...]:
        """Return the axes without the first optional ones."""
        return tuple([axis for axis in self.axes if axis not in self.optional[:count]])

    @property
    def shape(self) -> str:
        """The axes as docstrings write them, such as "(B, Hq, Nq, D)"."""
        forms = []
        for count in range(len(self.optional), -1, -1):
            axes = [f"{axis} or 1" if axis in self.shared else axis for axis in self.without(count)]
            forms.append(f"({', '.join(axes)}{',' * (len(axes) == 1)})")
        return " or ".join(filter(None, (", ".join(forms[:-1]), forms[-1])))


class Axes:
    """The axes, dtypes and devices that tensors must have, parsed once from a line of text.

    Args:
        text: Entries between semicolons. ``name: dtype[axes]`` is a tensor; all tensors are on one device. The dtype is
            one of torch, "float" (what attention computes with), "floating", "int", "index" (int32 or int64), an
            earlier tensor with the same dtype, or a name that :meth:`fit` is given; it may be left out. An axis is a
            number, or a name with one size wherever it occurs; ``name|1`` may be 1 too, and ``name?`` may be left out.
            ``Hq % Hkv`` states that Hkv divides Hq.

    Example:
        >>> from ringweave.axes import Axes
        >>> inputs = Axes("q: float[B Hq Nq D]; k: q[B Hkv Nk D]; v: q[B Hkv Nk Dv]; Hq % Hkv")
        >>> inputs.fit(q=q, k=k, v=v)["Nk"]
        256
        >>> inputs.fit(q=q, k=k, v=v[:, :, :200])
        Traceback (most recent call last):
        ...
        ringweave.errors.ShapeError: v: got shape (1, 4, 200, 32); wanted (B, Hkv, Nk, Dv) with Nk = 256, the number of keys of k. Give v and k the same Nk.
    """  # noqa: E501

    def __init__(self, text: str):
        entries, multiples, numbers = list[_Entry](), list[tuple[str, str]](), dict[str, Any]()
        for part in text.split(";"):
            name, colon, stated = (each.strip() for each in part.partition(":"))
            if not colon:
                size, divisor = name.split(" % ")
                multiples.append((size, divisor))
                continue
            dtype, listed = stated.removesuffix("]").split("[")
            written = listed.split()
            axes = tuple([axis.removesuffix("|1").removesuffix("?") for axis in written])
            shared = frozenset([axis.removesuffix("|1") for axis in written if axis.endswith("|1")])
            optional = tuple([axis.removesuffix("?") for axis in written if axis.endswith("?")])
            numbers |= {axis: int(axis) for axis in axes if axis.isdigit()}
            types = _KINDS[dtype][0] if dtype in _KINDS else ()
            entries.append(_Entry(name, dtype, types, axes, shared, optional))
        self._entries, self._multiples, self._numbers = tuple(entries), tuple(multiples), numbers
        self._names = frozenset([entry.name for entry in entries])

    def fit(
        self,
        *,
        error: type[RingweaveError] = ShapeError,
        device: torch.device | None = None,
        anywhere: bool = False,
        empty: Sequence[str] = (),
        remedy: str = "",
        **given: Any,
    ) -> dict[str, Any]:
        """Raise an error unless the tensors fit, and return the sizes of the axes by name.

        Args:
            error: Class of the error.
            device: Device of the tensors; that of the first one by default.
            anywhere: Whether the tensors may be on any devices.
            empty: Axes that may have no entries.
            remedy: Remedy for a wrong type, rank or size, in place of a general one.
            **given: The tensors by name, known sizes by axis, and dtypes by the name that stands for them.
        """
        sizes = {**self._numbers, **given}
        for entry in self._entries:
            name, dtype, types, axes, shared, _ = entry
            x = given[name]
            if not isinstance(x, Tensor):
                raise error(name, shown(x), f"a tensor {entry.shape}", remedy or "Pass a torch tensor.")
            if x.layout != torch.strided or x.is_nested:
                got = f"a {'nested' if x.is_nested else x.layout} tensor"
                raise error(name, got, "a dense one", "Convert it with .to_dense() or pad it.")
            shape = x.shape
            if len(shape) != len(axes):
                left_out = entry.optional[: max(len(axes) - len(shape), 0)]
                axes = entry.without(len(left_out))
                # an axis is left out by all tensors or by none
                if len(axes) != len(shape) or any(sizes.get(axis) is not given.get(axis) for axis in left_out):
                    raise error(*self._rank(entry, x, remedy))
                sizes = dict.fromkeys(left_out) | sizes
            same = given[dtype].dtype if dtype in self._names else None
            if x.dtype != same and x.dtype not in types and (wrong := self._dtype(name, dtype, given)):
                raise error(*wrong)
            if device is None:
                device = x.device
            if x.device != device and not anywhere:
                raise error(*self._device(name, device, given))
            for axis, size in zip(axes, shape, strict=True):
                if axis not in sizes:
                    if axis not in shared or size != 1:
                        sizes[axis] = size
                elif size != sizes[axis] and not (axis in shared and size == 1):
                    raise error(*self._size(entry, axis, sizes, given, remedy))
                # a size that a trace does not know is compared with 0 only where it must not be 0
                if axis not in empty and size == 0:
                    wanted = f"{entry.shape} without an empty axis"
                    raise error(name, f"shape {tuple(shape)}", wanted, "Skip the call for an empty tensor.")
        for axis, divisor in self._multiples:
            if sizes[axis] % max(sizes[divisor], 1):
                raise error(*self._multiple(axis, divisor, sizes, given, remedy))
        return sizes

    def _dtype(self, name: str, dtype: str, given: dict[str, Any]) -> _Wrong | None:
        got, remedy = given[name].dtype, f"Convert {name} with .to(...)."
        if not dtype:
            return None
        types: Any
        if dtype in self._names:
            types, wanted = given[dtype].dtype, f"{given[dtype].dtype}, as {dtype}"
            remedy = f"Convert with {name}.to({dtype}.dtype)."
        elif dtype in _KINDS:
            types, wanted = _KINDS[dtype]
        else:
            types = given[dtype] if dtype in given else getattr(torch, dtype)
            wanted = " or ".join(map(str, types)) if isinstance(types, tuple) else str(types)
        fits = got in types if isinstance(types, tuple) else got == types
        return None if fits else (f"{name}.dtype", got, wanted, remedy)

    def _device(self, name: str, device: torch.device, given: dict[str, Any]) -> _Wrong:
        first, got = self._entries[0].name, given[name].device
        if name != first and given[first].device == device:
            return f"{name}.device", got, f"{device}, as {first}", f"Move it with {name}.to({first}.device)."
        return f"{name}.device", got, str(device), f"Move it with {name}.to({str(device)!r})."

    def _rank(self, entry: _Entry, x: Tensor, remedy: str) -> _Wrong:
        if not remedy:
            one = entry.axes[0] == "B" and x.ndim == len(entry.axes) - 1
            remedy = f"Pass {entry.name}[None] for a batch of one." if one else f"Reshape it to {entry.shape}."
        return entry.name, f"shape {tuple(x.shape)}", entry.shape, remedy

    def _size(self, entry: _Entry, axis: str, sizes: dict[str, Any], given: dict[str, Any], remedy: str) -> _Wrong:
        owner, condition = self._owner(axis, given), ""
        if sizes[axis] is None:
            condition = f" without {axis}, as another tensor"
        elif axis not in self._numbers:
            condition = f" with {axis} = {sizes[axis]}, {_meaning(axis, owner, entry)}"
        if not remedy:
            remedy = f"Make {entry.name} of this shape."
            if owner is not None and owner is not entry:
                remedy = f"Give {entry.name} and {owner.name} the same {axis}."
        return entry.name, f"shape {tuple(given[entry.name].shape)}", f"{entry.shape}{condition}", remedy

    def _multiple(self, axis: str, divisor: str, sizes: dict[str, Any], given: dict[str, Any], remedy: str) -> _Wrong:
        entry, relation, known = self._owner(divisor, given), f"{divisor} a divisor", axis
        if entry is None:
            entry, relation, known = self._owner(axis, given), f"{axis} a multiple", divisor
        assert entry is not None
        meaning = _meaning(known, self._owner(known, given), entry)
        wanted = f"{entry.shape} with {relation} of {sizes[known]}, {meaning}"
        return entry.name, f"shape {tuple(given[entry.name].shape)}", wanted, remedy or f"Change {axis} or {divisor}."

    def _owner(self, axis: str, given: dict[str, Any]) -> _Entry | None:
        """Return the first tensor with an axis; None for a size that the caller gave."""
        if axis in given:
            return None
        return next((entry for entry in self._entries if axis in entry.axes and axis not in entry.shared), None)


def _meaning(axis: str, owner: _Entry | None, beside: _Entry) -> str:
    """Describe an axis, with the tensor that has it unless it is the tensor of the error."""
    meaning = f"the {_MEANINGS.get(axis, axis)}"
    return meaning if owner is None or owner is beside else f"{meaning} of {owner.name}"
