"""GPU data sheets, CUDA environment variables, CPU threads and allocator."""
