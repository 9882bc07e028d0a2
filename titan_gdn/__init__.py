"""Linear-attention layers for TorchTitan, split over context- and tensor-parallel ranks."""
