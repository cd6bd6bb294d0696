"""What Triton raises, by type: it has no common one with PyTorch."""

from __future__ import annotations


def errors() -> tuple[type[Exception], ...]:
    """What is raised where a kernel does not compile, or not fit a device."""
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, CompilationError, OutOfResources, PTXASError)
