"""XXH3_64bits (default secret, seed 0) of long input: its constants, and a slow reference for kernels."""

import torch
from torch import Tensor

SHORT_BYTES = 240  # other algorithms are for input up to this length
GROUP_BYTES, STRIPE_BYTES, LANES = 1024, 64, 8
AVALANCHE_PRIME = 0x165667919E3779F9
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
INITIAL = (PRIME32_3, *PRIME64[:4], PRIME32_2, PRIME64[4], PRIME32_1)  # accumulators
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SCRAMBLE_OFFSET = len(SECRET) - STRIPE_BYTES
LAST_OFFSET = SCRAMBLE_OFFSET - 7
MERGE_OFFSET = 11

_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1


def secret_words(offset: int) -> list[int]:
    """The eight u64 that key a stripe."""
    return [int.from_bytes(SECRET[offset + 8 * lane : offset + 8 * lane + 8], "little") for lane in range(LANES)]


def xxh3_64_reference(data: Tensor) -> int:
    """The digest of [bytes] uint8 on the CPU. raises: ValueError unless there are more than 240."""
    size_bytes = data.numel()
    if size_bytes <= SHORT_BYTES:
        raise ValueError(f"the reference is for more than {SHORT_BYTES} bytes, got {size_bytes}")
    accumulators = list(INITIAL)
    full_groups = (size_bytes - 1) // GROUP_BYTES
    for group in range(full_groups):
        for stripe in range(GROUP_BYTES // STRIPE_BYTES):
            _accumulate(accumulators, data, group * GROUP_BYTES + stripe * STRIPE_BYTES, 8 * stripe)
        for lane, key in enumerate(secret_words(SCRAMBLE_OFFSET)):
            value = accumulators[lane]
            accumulators[lane] = ((value ^ value >> 47 ^ key) * PRIME32_1) & _U64
    for stripe in range((size_bytes - 1 - full_groups * GROUP_BYTES) // STRIPE_BYTES):
        _accumulate(accumulators, data, full_groups * GROUP_BYTES + stripe * STRIPE_BYTES, 8 * stripe)
    _accumulate(accumulators, data, size_bytes - STRIPE_BYTES, LAST_OFFSET)

    keyed = [value ^ key for value, key in zip(accumulators, secret_words(MERGE_OFFSET), strict=True)]
    products = [low * high for low, high in zip(keyed[::2], keyed[1::2], strict=True)]
    digest = (size_bytes * PRIME64[0] + sum((product & _U64) ^ (product >> 64) for product in products)) & _U64
    digest = ((digest ^ digest >> 37) * AVALANCHE_PRIME) & _U64
    return digest ^ digest >> 32


def _accumulate(accumulators: list[int], data: Tensor, start: int, secret_offset: int) -> None:
    stripe = data[start : start + STRIPE_BYTES].clone().view(torch.int64).tolist()
    for lane, (signed, key) in enumerate(zip(stripe, secret_words(secret_offset), strict=True)):
        word = signed & _U64
        keyed = word ^ key
        accumulators[lane] = (accumulators[lane] + (keyed & _U32) * (keyed >> 32)) & _U64
        accumulators[lane ^ 1] = (accumulators[lane ^ 1] + word) & _U64
