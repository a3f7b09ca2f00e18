"""Plans in a real pipeline engine: torch.distributed.pipelining over gloo, on emulated clusters and on real layers."""
