"""Names of the three matmuls of a linear layer; `gemm_formats` says what each is. A record of a run is read by them
without torch."""

GEMM_NAMES = ("fprop", "dgrad", "wgrad")
