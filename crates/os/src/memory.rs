//! What the kernel says of the machine's memory (`/proc/meminfo`).

use std::fs;

/// A field of `/proc/meminfo` in bytes; `None` if it cannot be read.
pub fn memory_bytes(field: &str) -> Option<u64> {
    parse(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

/// The kernel counts in KiB.
fn parse(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let text = "MemTotal:       100 kB\nMemAvailable:    50 kB\n";
        assert_eq!(parse(text, "MemAvailable"), Some(50 * 1024));
        assert_eq!(parse(text, "Mem"), None);
        assert!(memory_bytes("MemTotal") >= memory_bytes("MemAvailable"));
    }
}
