"""The type in which compressed keys (mean-pooled keys) are kept on the device, a torch-free choice.

A mean is worked out in fp32 whatever is chosen, and rounded once when it is stored. Betas and their means stay fp32:
rounded, they would tie.
"""

from __future__ import annotations

from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import DTYPE_BYTES

KEY_MEANS_DTYPES = ("float32", "model")


def stored_key_means_dtype(key_means_dtype: str, model_dtype: str) -> str:
    """Name of the stored type: fp32 (fp64 of an fp64 model), or with "model" the model's own. ConfigError for another
    choice.

    >>> stored_key_means_dtype("float32", "bfloat16"), stored_key_means_dtype("model", "bfloat16")
    ('float32', 'bfloat16')
    """
    if key_means_dtype not in KEY_MEANS_DTYPES:
        raise ConfigError(f"key_means_dtype={key_means_dtype!r} must be one of {', '.join(KEY_MEANS_DTYPES)}")
    return model_dtype if key_means_dtype == "model" or model_dtype == "float64" else "float32"


def key_mean_item_bytes(key_means_dtype: str, model_dtype: str) -> int:
    """Bytes of one stored number of a key mean.

    >>> key_mean_item_bytes("float32", "bfloat16"), key_mean_item_bytes("model", "bfloat16")
    (4, 2)
    """
    return DTYPE_BYTES[stored_key_means_dtype(key_means_dtype, model_dtype)]
