"""Parts of `bench_proof.py`: what a memory gains, beside what, at which cost, and whom it harms."""
