"""Pages that hold data and scales of a codec: their tables, and what kvpool.core.codecs makes of the same rows."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvpool.core import codecs
from kvpool.core.elements import Codec, Dtype
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.gather import gather_pages_reference
from kvpool_gpuagent.kernels.tables import CopyShape, PlaneColumn, widest_unit_bytes
from tests.kernels.paged_caches import (
    HEADER_BYTES,
    POISON,
    UNIT_ROWS,
    PagedCache,
    Pages,
    PayloadPlaces,
    make_pages,
    paged_cache,
    poisoned,
)

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
    data: PayloadPlaces
    scales: PayloadPlaces

    @classmethod
    def of(
        cls, cache: PagedCache, codec: RowCodec, dtype: torch.dtype, blocks: Tensor, positions: int
    ) -> "QuantizedPages":
        _blocks, block_rows, heads, row_bytes = cache.views[0].shape
        engine = cache.planes(cache.payload(positions)).cpu()
        unit = widest_unit_bytes(row_bytes, *engine[:, : PlaneColumn.PAYLOAD_OFFSET].flatten().tolist())
        rows = CopyShape(positions, block_rows, heads, row_bytes, unit, len(cache.views), cache.row_planes, UNIT_ROWS)
        shape = CodecShape(rows, codec, dtype)
        data = replace(cache.payload(positions), row_bytes=shape.data_row_bytes)
        scale_row_bytes = Codec(codec.value).format.scale_row_bytes(shape.row_elements, DTYPES[dtype])
        scales = replace(data, row_bytes=scale_row_bytes, start=data.size_bytes)
        planes = cache.planes(data).cpu()
        for plane in range(len(cache.views)):
            planes[plane, PlaneColumn.SCALE_PAYLOAD_OFFSET] = scales.offset(plane)
        device = str(blocks.device)
        pages = make_pages(len(blocks), data.size_bytes + scales.size_bytes, len(cache.views), heads, device)
        return cls(cache, shape, planes.to(device), pages, blocks, data, scales)

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

    def encoded(self, rows: np.ndarray | None = None) -> Tensor:
        """[N, payload bytes]: what pages must hold; poison where they hold nothing."""
        payloads = torch.full_like(self.pages.payloads, POISON)
        data, scales = codecs.encode_rows(*self.codec, self.rows() if rows is None else rows)
        for places, part in ((self.data, data), (self.scales, scales)):
            places.put(payloads, torch.from_numpy(part).to(payloads.device))
        return payloads

    def decoded(self) -> Tensor:
        """[N, plane, position, head, byte]: what caches must get from the pages as they are."""
        payloads = self.pages.payloads
        data, scales = (places.rows_of(payloads).cpu().contiguous().numpy() for places in (self.data, self.scales))
        return torch.from_numpy(codecs.decode_rows(*self.codec, data, scales)).to(self.blocks.device)

    def expected_slots(self, *, present: Tensor) -> Tensor:
        slots = poisoned(tuple(self.pages.slots.shape), str(self.blocks.device))
        encoded = self.encoded()
        for page in present.tolist():
            slots[page, HEADER_BYTES : HEADER_BYTES + self.pages.payload_bytes] = encoded[page]
        return slots
