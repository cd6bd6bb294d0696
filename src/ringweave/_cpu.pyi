"""The native CPU kernel (csrc/); absent from wheels that were built without a compiler."""

from torch import Tensor

def variants() -> list[str]: ...
def term_kinds() -> list[str]: ...
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    row_ptr: Tensor,
    col: Tensor,
    bits: Tensor,
    masks: Tensor,
    group: Tensor,
    q_tile: int,
    kv_tile: int,
    scale: float,
    threads: int,
    variant: str = "",
) -> bool: ...
def tile_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    values: Tensor,
    row_ptr: Tensor,
    col: Tensor,
    bits: Tensor,
    masks: Tensor,
    group: Tensor,
    q_tile: int,
    kv_tile: int,
    scale: float,
    threads: int,
    variant: str = "",
) -> None: ...
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    row_ptr: Tensor,
    col: Tensor,
    bits: Tensor,
    col_ptr: Tensor,
    row: Tensor,
    bits_t: Tensor,
    masks: Tensor,
    group: Tensor,
    q_tile: int,
    kv_tile: int,
    scale: float,
    threads: int,
    variant: str = "",
) -> None: ...

class Prepared:
    """A call that was checked; its tensors come as addresses and strides, and are not."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_ptr: Tensor,
        col: Tensor,
        bits: Tensor,
        masks: Tensor,
        group: Tensor,
        q_tile: int,
        kv_tile: int,
        scale: float,
        variant: str,
        table: Tensor | None = None,
        keys: int = 0,
        spacing: tuple[int, ...] = (),
        wide: bool = False,
        scaled: bool = False,
    ) -> None: ...
    def columns(self, col_ptr: Tensor, row: Tensor, bits_t: Tensor) -> None: ...
    def forward(self, *places: int | tuple[int, ...]) -> bool: ...
    def backward(self, *places: int | tuple[int, ...]) -> None: ...

def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, threads: int, variant: str = "") -> None: ...
def delta(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor, threads: int, variant: str = "") -> None: ...
def fma_peak(dtype: str, threads: int, seconds: float, variant: str = "") -> float: ...
def read_all(words: Tensor, threads: int) -> int: ...
