"""From a function to a program in planned memory: kernels, schedule, its proof, dumps."""
