"""The CUDA device alone, measured: `python -m kvpool_gpuagent.measure`, one JSON command a line, one JSON answer each.

What `kvpool bench gpu` starts as the agent's side: it maps an engine's cache as an agent would, with an arena of its
own, and moves pages for so long, or copies as many bytes plainly: the link's own figure. The first line says what there
is, or {"error": ...}; a command that fails is answered by {"error": text, "type": name}. The end of the input ends it.

  {"op": "listen", "socket": path}    an engine that lends scratch registers there
  {"op": "map", "geometry": [layers, kv_heads, head_dim, latent_dim], "codec": name, "layout": preset, "heads": [a, b],
   "block_tokens": n, "block_count": n, "chunk_tokens": n, "handles": [[uuid, hex, offset, allocation, size], ...],
   "lent": true if the engine that has registered shall launch kernels for this cache}
  {"op": "unmap"}
  {"op": "way", "way": "runs" | "bursts" | "engine" | null}
  {"op": "run", "what": "store" | "load" | "both" | "copy-out" | "copy-in" | "copy-both", "size_bytes": n,
   "in_flight": n, "seconds": s, "memory": "arena" | "allocated"}
  {"op": "peer", ... as "map", with "peer": ordinal; no handles: the source is allocated here}
  {"op": "peer-run", "what": "pull" | "copy", "size_bytes": n, "in_flight": n, "seconds": s, "programs": n}
  {"op": "peer-end"}

Sizes count the cache's bytes, whatever a codec makes of them: logical bytes. A transfer has whole pages; plain copies
have as many bytes as a transfer of that size has with the cache that is mapped.
"""
