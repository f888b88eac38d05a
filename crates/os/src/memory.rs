//! What the kernel says of the machine's memory (`/proc/meminfo`), and of what this process may have of it (cgroups(7)).

use std::fs;
use std::path::Path;

/// A field of `/proc/meminfo` in bytes; `None` if it cannot be read.
pub fn memory_bytes(field: &str) -> Option<u64> {
    parse(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

/// The kernel counts in KiB.
fn parse(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The least limit of this process's control groups and those above them, in bytes; `None` without any.
pub fn group_memory_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    least_limit(Path::new("/sys/fs/cgroup"), &groups)
}

/// Version 2 has one line `0::PATH`, version 1 one for each controller. In a container the path may be that of the host,
/// and what can be read at the root is the container's.
fn least_limit(root: &Path, groups: &str) -> Option<u64> {
    groups.lines().filter_map(|line| limit_of(root, line)).min()
}

fn limit_of(root: &Path, line: &str) -> Option<u64> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let (top, file) = if controllers.is_empty() {
        (root.to_owned(), "memory.max")
    } else if controllers.split(',').any(|name| name == "memory") {
        (root.join("memory"), "memory.limit_in_bytes")
    } else {
        return None;
    };
    let group = top.join(path.trim_start_matches('/'));
    let groups = group.ancestors().take_while(|place| place.starts_with(&top));
    // "max" is none.
    groups.filter_map(|place| fs::read_to_string(place.join(file)).ok()?.trim().parse().ok()).min()
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
    #[test]
    fn the_least_limit_of_the_groups_above_counts() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |groups: &str| least_limit(root, groups);
        assert_eq!(limit("0::/a/b\n"), None);
        put("a/b/memory.max", "max\n");
        assert_eq!(limit("0::/a/b\n"), None);
        put("a/memory.max", "4096\n");
        assert_eq!(limit("0::/a/b\n"), Some(4096));
        put("memory.max", "8192\n");
        assert_eq!(limit("0::/host/path\n"), Some(8192), "of a container");
        assert_eq!(limit("0::/a/b\n"), Some(4096));
        put("memory/c/memory.limit_in_bytes", "2048\n");
        assert_eq!(limit("5:cpu:/c\n4:cpu,memory:/c\n"), Some(2048));
        assert_eq!(limit("5:cpu:/c\n"), None);
        assert_eq!(limit("nonsense\n\n"), None);
    }
}
