"""Errors that a user can act on: each names the value, the limit and the remedy.

The CLI prints these as one line on stderr and exits with code 2; anything else is a bug.
"""

from __future__ import annotations


class NosaError(Exception):
    """Base of every error caused by what the user gave, not by a fault of the program."""


class ConfigError(NosaError, ValueError):
    """A configuration value breaks a rule (see SparseConfig)."""


class CheckpointError(NosaError):
    """A checkpoint file or tensor is missing, short, of the wrong shape or type."""


class TraceError(NosaError):
    """A trace directory cannot be read, is of another schema, or breaks its own rules."""


class HardwareError(NosaError):
    """A hardware profile is unknown, unreadable, or is asked for something it never measured."""


class CapacityError(NosaError):
    """Something does not fit: slots, host memory, positions."""


class NumericsError(NosaError):
    """A NaN reached a selection; names layer, KV head and block."""
