"""From budget options to a SparseConfig: blocks or tokens, flags over file over base, each value with its origin."""

from __future__ import annotations

from nosa_sys.cli.options import BudgetFlags
from nosa_sys.cli.settings import Settings
from nosa_sys.errors import ConfigError
from nosa_sys.sparse_config import SparseConfig


def _blocks(name: str, tokens: int, block_size: int) -> int:
    if block_size < 1 or tokens % block_size:
        raise ConfigError(f"{name}={tokens} must be a whole number of blocks of block_size={block_size}")
    return tokens // block_size


def resolve_budgets(flags: BudgetFlags, settings: Settings, base: SparseConfig, base_origin: str) -> SparseConfig:
    """The configuration, noted value by value in ``settings``.

    Budgets that were not given come from ``base``; when the block size changes they keep their size in tokens.
    Raises ConfigError when blocks and tokens of one budget are both given, or when a rule is broken.
    """

    def find(name: str) -> tuple[int | None, str | None]:
        return settings.find(name, getattr(flags, name), int)

    block_size, origin = find("block_size")
    if block_size is None:
        block_size, origin = base.block_size, base_origin
    if block_size < 1:
        raise ConfigError(f"block_size={block_size} must be >= 1")
    same_size = block_size == base.block_size
    settings.note("block_size", block_size, origin or base_origin)

    def budget(blocks_name: str, tokens_name: str, base_blocks: int) -> tuple[int, str]:
        blocks, blocks_origin = find(blocks_name)
        tokens, tokens_origin = find(tokens_name)
        if blocks is not None and tokens is not None:
            if blocks_origin == tokens_origin:
                raise ConfigError(f"{blocks_name}={blocks} and {tokens_name}={tokens} name one budget; give only one")
            # a flag wins over the file, in whichever unit each was given
            blocks, tokens = (blocks, None) if blocks_origin == "flag" else (None, tokens)
        if blocks is not None:
            return blocks, blocks_origin or ""
        if tokens is not None:
            return _blocks(tokens_name, tokens, block_size), f"{tokens_origin}, tokens"
        if same_size:
            return base_blocks, base_origin
        return _blocks(f"{blocks_name} ({base_origin}) in tokens", base_blocks * base.block_size, block_size), "derived"

    topk, topk_origin = budget("topk", "topk_tokens", base.topk)
    k_e, k_e_origin = find("k_e")
    for name in ("select_blocks", "select_tokens"):
        given, given_origin = find(name)
        if k_e is not None and given is not None:
            if given_origin == k_e_origin:
                raise ConfigError(f"k_e={k_e} and {name}={given} name one budget (select = k - k_e); give only one")
            if given_origin == "flag":
                k_e = None
    if k_e is not None:
        if not 0 <= k_e <= topk:
            raise ConfigError(f"k_e={k_e} must lie in [0, topk={topk}]")
        select, select_origin = topk - k_e, "derived from k_e"
    else:
        select, select_origin = budget("select_blocks", "select_tokens", base.select_blocks)
    if not same_size and find("init_blocks")[1] is None and find("init_tokens")[1] is None:
        # sinks are rounded up: fewer tokens than asked for would drop the sink
        init, init_origin = -(-base.init_blocks * base.block_size // block_size), "derived"
    else:
        init, init_origin = budget("init_blocks", "init_tokens", base.init_blocks)
    window_tokens, window_origin = _window(flags, settings, base, base_origin, block_size)
    stride, stride_origin = find("kernel_stride")
    if stride is None:
        stride, stride_origin = base.kernel_stride, base_origin
    config = SparseConfig(
        block_size=block_size,
        kernel_size=2 * stride,
        kernel_stride=stride,
        topk=topk,
        init_blocks=init,
        window_size=window_tokens,
        select_blocks=select,
    )
    for name, value, source in (
        ("k (topk)", _both(topk, block_size), topk_origin),
        ("init", _both(init, block_size), init_origin),
        ("window", _both(config.local_blocks, block_size), window_origin),
        ("k_q (select)", _both(select, block_size), select_origin),
        ("k_e", _both(config.k_e, block_size), "derived" if k_e is None else k_e_origin or ""),
        ("gamma floor k_e/k", f"{config.guaranteed_gamma:.4g}", "derived"),
        ("kernel_size / stride", f"{config.kernel_size} / {stride} tokens", stride_origin or ""),
    ):
        settings.note(name, value, source)
    return config


def _window(
    flags: BudgetFlags, settings: Settings, base: SparseConfig, base_origin: str, block_size: int
) -> tuple[int, str]:
    """Window in tokens: --window-size or --window-blocks."""
    tokens, tokens_origin = settings.find("window_size", flags.window_size, int)
    blocks, blocks_origin = settings.find("window_blocks", flags.window_blocks, int)
    if tokens is not None and blocks is not None:
        if tokens_origin == blocks_origin:
            raise ConfigError(f"window_size={tokens} and window_blocks={blocks} name one budget; give only one")
        if tokens_origin == "flag":
            blocks = None
    if blocks is not None:
        return blocks * block_size, blocks_origin or ""
    if tokens is not None:
        return tokens, tokens_origin or ""
    return base.window_size, base_origin


def _both(blocks: int, block_size: int) -> str:
    return f"{blocks} blocks = {blocks * block_size:,} tokens"
