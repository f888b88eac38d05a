//! How cold bytes are best divided between a GPU that must fetch them and a CPU that attends to
//! them in place.
//!
//! Both read the same memory: the link carries `x * bytes` at `pcie`, the cores read the rest at
//! what they or the memory can do, and all of it passes the memory once. So the time is
//! `max(x * bytes / pcie, (1 - x) * bytes / cpu, bytes / dram)`, least at `x = pcie / (pcie + cpu)`.

/// Bytes per second of K and V that one core attends to (f16, five query heads for each KV head).
pub const CORE_BYTES_PER_SECOND: f64 = 30e9;

/// What moves bytes, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidths {
    /// From host memory to the GPU; 0 without one.
    pub pcie: f64,
    /// Of host memory.
    pub dram: f64,
    /// Cores that attend.
    pub cores: u32,
}

/// A division of cold bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Split {
    /// Share of the bytes that the GPU fetches, from 0 to 1.
    pub gpu_share: f64,
    /// Expected time.
    pub seconds: f64,
}

impl Bandwidths {
    /// Bytes per second that the cores attend to in place.
    pub fn cpu(&self) -> f64 {
        (CORE_BYTES_PER_SECOND * f64::from(self.cores)).min(self.dram)
    }

    /// Time for `bytes` of which `gpu_share` go to the GPU, in seconds.
    #[allow(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
    pub fn seconds(&self, bytes: u64, gpu_share: f64) -> f64 {
        let bytes = bytes as f64;
        let time = |bytes: f64, rate: f64| if bytes == 0.0 { 0.0 } else { bytes / rate };
        time(gpu_share * bytes, self.pcie)
            .max(time((1.0 - gpu_share) * bytes, self.cpu()))
            .max(time(bytes, self.dram))
    }

    /// The fastest division of `bytes`; with neither a link nor cores it takes for ever.
    pub fn best_split(&self, bytes: u64) -> Split {
        let both = self.pcie + self.cpu();
        let gpu_share = if both > 0.0 { self.pcie / both } else { 0.0 };
        Split { gpu_share, seconds: self.seconds(bytes, gpu_share) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 65,536 tokens of 8 KV heads x 128 in f16, K and V.
    const LAYER_BYTES: u64 = 65536 * 8 * 128 * 2 * 2;

    #[test]
    fn milliseconds_of_a_layer() {
        fn check(pcie: f64, dram: f64, cores: u32, expected: (f64, f64)) {
            let bandwidths = Bandwidths { pcie: pcie * 1e9, dram: dram * 1e9, cores };
            let split = bandwidths.best_split(LAYER_BYTES);
            let milliseconds = split.seconds * 1e3;
            assert!((split.gpu_share - expected.0).abs() < 0.01, "{split:?}");
            assert!((milliseconds - expected.1).abs() < 0.05, "{milliseconds} ms, {expected:?}");
            for share in 0..=100 {
                let other = bandwidths.seconds(LAYER_BYTES, f64::from(share) / 100.0);
                assert!(other >= split.seconds * (1.0 - 1e-9), "{share} % is faster");
            }
        }
        // PCIe 3 alone, the CPU alone (60 GB/s), and both: the memory is then the limit.
        check(12.0, 60.0, 0, (1.0, 22.37));
        check(0.0, 60.0, 8, (0.0, 4.47));
        check(12.0, 60.0, 8, (12.0 / 72.0, 4.47));
        // Two cores beside PCIe 5 with memory to spare.
        check(55.0, 400.0, 2, (55.0 / 115.0, 2.33));
    }

    #[test]
    fn nothing_to_move_or_nothing_to_move_it() {
        let none = Bandwidths { pcie: 0.0, dram: 60e9, cores: 0 };
        assert!(none.best_split(0).seconds.abs() < 1e-12);
        assert!(none.best_split(1).seconds.is_infinite());
    }
}
