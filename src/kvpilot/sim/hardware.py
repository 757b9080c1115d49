"""Machines to simulate, as data: how long prefill takes, how large tiers are, how fast the links between them."""

from __future__ import annotations

import msgspec

from kvpilot.domain import Tier


class Store(msgspec.Struct, frozen=True):
    """A tier below the device. ``size`` is its capacity as a multiple of the device's KV memory."""

    tier: Tier
    size: float
    read_bytes_per_s: float
    latency_s: float
    price_per_gb: float = 0.0


class Hardware(msgspec.Struct, frozen=True):
    """One node with one model. ``pair_s``: what a pair of a new token and one before it costs."""

    name: str
    bytes_per_token: int
    base_s: float
    token_s: float
    pair_s: float
    decode_token_s: float
    stores: tuple[Store, ...]
    """From fast to slow; each is reached through those before it."""
    price_per_gb: float = 0.0
    """Of the device's memory: that of devices by what they have of it. All prices in one currency."""

    @property
    def prices(self) -> dict[Tier, float]:
        """Per GB, by tier, fast to slow."""
        return {Tier.DEVICE: self.price_per_gb} | {store.tier: store.price_per_gb for store in self.stores}

    def prefill_s(self, new: int, behind: int) -> float:
        """Seconds of computing ``new`` tokens behind ``behind`` whose KV is there."""
        return self.base_s + new * (self.token_s + self.pair_s * (behind + new / 2))


# Prices are rough, in US dollars: an H100 of 80 GB for 30,000, a 910B of 64 GB for 15,000, 5 a GB of DRAM, 0.1 of NVMe.
PROFILES = {
    profile.name: profile
    for profile in (
        # Eight H100 of 80 GB, Llama-3.3-70B with 8-bit weights and 16-bit KV (80 layers, 8 KV heads of 128), half of
        # the peak in dense 8-bit arithmetic: 4e15 FLOP/s against 1.4e11 FLOP a token and 2.6e6 a pair of tokens. About
        # 480 GB are left for KV. Host: 1.5 TB behind PCIe 5. Four NVMe drives of 6 GB/s, 15 TB.
        Hardware(
            name="h100-nvme",
            bytes_per_token=327_680,
            base_s=0.02,
            token_s=3.5e-5,
            pair_s=6.5e-10,
            decode_token_s=0.015,
            price_per_gb=375.0,
            stores=(
                Store(Tier.HOST, size=3.0, read_bytes_per_s=200e9, latency_s=0.001, price_per_gb=5.0),
                Store(Tier.DISK, size=30.0, read_bytes_per_s=24e9, latency_s=0.002, price_per_gb=0.1),
            ),
        ),
        # Eight Ascend 910B of 64 GB, the same model with 16-bit weights, 1.3e15 FLOP/s in use; about 320 GB are left
        # for KV. Host: 1.5 TB behind PCIe 4. Two NVMe drives.
        Hardware(
            name="ascend-nvme",
            bytes_per_token=327_680,
            base_s=0.03,
            token_s=1.1e-4,
            pair_s=2e-9,
            decode_token_s=0.025,
            price_per_gb=235.0,
            stores=(
                Store(Tier.HOST, size=4.5, read_bytes_per_s=100e9, latency_s=0.001, price_per_gb=5.0),
                Store(Tier.DISK, size=45.0, read_bytes_per_s=12e9, latency_s=0.002, price_per_gb=0.1),
            ),
        ),
        # Two CPU cores, m16k, from `kvpilot bench tiers` at 15,360 tokens: recompute 24.6 s, device hit with 32 new
        # tokens 0.16 s and with 256 0.75 s, 0.31 s more from host memory, 0.89 s more again from a cold disk.
        Hardware(
            name="this-cpu",
            bytes_per_token=16_384,
            base_s=0.07,
            token_s=5.3e-4,
            pair_s=1.39e-7,
            decode_token_s=0.05,
            price_per_gb=5.0,
            stores=(
                Store(Tier.HOST, size=2.0, read_bytes_per_s=0.8e9, latency_s=0.01, price_per_gb=5.0),
                Store(Tier.DISK, size=8.0, read_bytes_per_s=0.28e9, latency_s=0.02, price_per_gb=0.1),
            ),
        ),
        # The same cores, m4x256, measured from 1K to 33K tokens: recompute 4K in 0.86 s, 8K 2.5 s, 15K 7.0 s; device
        # hit 0.09 s, 8K from host memory or page cache 0.10 s more.
        Hardware(
            name="this-cpu-small",
            bytes_per_token=4096,
            base_s=0.09,
            token_s=1.05e-4,
            pair_s=4.5e-8,
            decode_token_s=0.025,
            price_per_gb=5.0,
            stores=(
                Store(Tier.HOST, size=2.0, read_bytes_per_s=0.4e9, latency_s=0.01, price_per_gb=5.0),
                Store(Tier.DISK, size=8.0, read_bytes_per_s=0.3e9, latency_s=0.02, price_per_gb=0.1),
            ),
        ),
    )
}
