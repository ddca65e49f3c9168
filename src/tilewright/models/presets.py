"""Named decoder shapes for Python users. Shapes only: recipes choose their own fields.

from tilewright.models.presets import PRESETS
model = Decoder(PRESETS["cpu_50m"])
"""

from types import MappingProxyType

from tilewright.models.config import DecoderConfig

PRESETS = MappingProxyType(
    {
        # 10.2M parameters: minutes on a laptop.
        "tiny": DecoderConfig.of(vocab_size=8192, dim=320, num_layers=6, num_heads=5, ffn_dim=896),
        # 46.9M: the model of the CPU throughput benchmark.
        "cpu_50m": DecoderConfig.of(vocab_size=16384, dim=512, num_layers=12, num_heads=8, ffn_dim=1408),
        # 8.03B: Llama 3 8B (Grattafiori et al., 2024, table 3).
        "llama3_8b": DecoderConfig.of(
            vocab_size=128_256,
            dim=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            ffn_dim=14_336,
            rope_theta=500_000.0,
            tie_embeddings=False,
        ),
        # 42.5B: the largest that full training is to fit on one 141 GB card.
        "dense_42b": DecoderConfig.of(
            vocab_size=128_256,
            dim=7680,
            num_layers=66,
            num_heads=60,
            num_kv_heads=12,
            ffn_dim=20_480,
            rope_theta=500_000.0,
            tie_embeddings=False,
        ),
    }
)
