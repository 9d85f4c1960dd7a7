"""Pages that hold data and scales of a codec: their tables, and what kvpool.core.codecs makes of the same rows."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpool.core import codecs
from kvpool.core.elements import Codec, Dtype
from kvpool.kernels.codec_shapes import CodecShape, RowCodec
from kvpool.kernels.gather import gather_pages_reference
from kvpool.kernels.tables import CopyShape, PlaneColumn, widest_unit_bytes
from tests.kernels.paged_caches import HEADER_BYTES, PagedCache, Pages, make_pages, paged_cache, poisoned

DTYPES = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16, torch.float32: Dtype.FP32}


def float_cache(layout: str, dtype: torch.dtype, device: str, *, row_elements: int, **sizes: int) -> PagedCache:
    """A cache of such elements: mostly like KV, some of any bit pattern, with zeros, infinities and NaNs."""
    cache = paged_cache(layout, row_bytes=row_elements * dtype.itemsize, device=device, **sizes)
    generator = torch.Generator().manual_seed(row_elements)
    for view in cache.views:
        values = torch.randn((*view.shape[:3], row_elements), generator=generator)
        values *= 10.0 ** torch.randint(-5, 3, (*view.shape[:3], 1), generator=generator)
        values[0] = 0
        values[-1].flatten()[:: row_elements * 3 + 5] = torch.nan
        values[-2].flatten()[:: row_elements * 2 + 3] = torch.inf
        elements = values.to(dtype).view(torch.uint8).to(device)
        any_bits = torch.rand(view.shape[:3], generator=generator).to(device) < 0.2
        view.copy_(torch.where(any_bits[..., None], view, elements))
    return cache


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """cache, and poisoned pages for some chunks of it. planes, blocks: on the device."""

    cache: PagedCache
    shape: CodecShape
    planes: Tensor
    pages: Pages
    blocks: Tensor

    @classmethod
    def of(
        cls, cache: PagedCache, codec: RowCodec, dtype: torch.dtype, blocks: Tensor, positions: int
    ) -> "QuantizedPages":
        planes = cache.planes(payload_start=0, positions=positions).cpu()
        _blocks, block_rows, heads, row_bytes = cache.views[0].shape
        unit = widest_unit_bytes(row_bytes, *planes[:, : PlaneColumn.PAYLOAD_OFFSET].flatten().tolist())
        rows = CopyShape(positions, block_rows, heads, row_bytes, unit, len(cache.views))
        shape = CodecShape(rows, codec, dtype)
        count = torch.arange(len(cache.views))
        data_bytes = positions * heads * shape.data_row_bytes
        scale_bytes = positions * heads * shape.scale_row_bytes
        planes[:, PlaneColumn.PAYLOAD_OFFSET] = count * data_bytes
        planes[:, PlaneColumn.SCALE_PAYLOAD_OFFSET] = len(count) * data_bytes + count * scale_bytes
        pages = make_pages(len(blocks), len(count) * (data_bytes + scale_bytes), len(count), str(blocks.device))
        return cls(cache, shape, planes.to(blocks.device), pages, blocks)

    @property
    def codec(self) -> tuple[Codec, Dtype]:
        return Codec(self.shape.codec.value), DTYPES[self.shape.dtype]

    @property
    def page_table(self) -> Tensor:
        return self.pages.table.to(self.blocks.device)

    def rows(self) -> np.ndarray:
        """[N, plane, position, head, byte] of the cache."""
        rows: np.ndarray = (
            gather_pages_reference(self.cache.views, self.blocks, self.shape.rows.positions).cpu().numpy()
        )
        return rows

    def encoded(self) -> Tensor:
        """[N, payload bytes]: what pages must hold."""
        count = len(self.blocks)
        parts = [part.reshape(count, -1) for part in codecs.encode_rows(*self.codec, self.rows())]
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(self.blocks.device)

    def decoded(self) -> Tensor:
        """[N, plane, position, head, byte]: what caches must get from the pages as they are."""
        payloads = self.pages.payloads.cpu().numpy()
        rows = self.rows()
        axes = rows.shape[:-1]
        data_bytes = int(np.prod(axes[1:])) * self.shape.data_row_bytes
        data = np.ascontiguousarray(payloads[:, :data_bytes]).reshape(*axes, self.shape.data_row_bytes)
        scales = np.ascontiguousarray(payloads[:, data_bytes:]).reshape(*axes, self.shape.scale_row_bytes)
        return torch.from_numpy(codecs.decode_rows(*self.codec, data, scales)).to(self.blocks.device)

    def expected_slots(self, *, present: Tensor) -> Tensor:
        slots = poisoned(tuple(self.pages.slots.shape), str(self.blocks.device))
        encoded = self.encoded()
        for page in present.tolist():
            slots[page, HEADER_BYTES : HEADER_BYTES + self.pages.payload_bytes] = encoded[page]
        return slots
