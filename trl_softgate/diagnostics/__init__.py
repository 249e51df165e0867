"""What a run tells about itself: statistics that merge exactly over micro-batches and processes."""
