//! How much memory this process may take.

use std::fs;
use std::path::Path;

/// Bytes that can be had without swapping: what the kernel estimates for the machine, or what the
/// control groups leave, if that is less. Both versions of control groups, at their usual places.
pub(super) fn available_bytes() -> u64 {
    machine_bytes("MemAvailable").min(least_of_groups(u64::saturating_sub))
}

/// Bytes that it may ever have: the machine's, or what the control groups allow, if that is less.
/// What is cached of files counts as used by a group, so this says more to whoever maps them.
pub fn limit_bytes() -> u64 {
    machine_bytes("MemTotal").min(least_of_groups(|limit, _| limit))
}

fn machine_bytes(field: &str) -> u64 {
    kvfs_os::memory_bytes(field).unwrap_or(0)
}

/// The least that a group gives, of its limit and what is used of it.
fn least_of_groups(given: impl Fn(u64, u64) -> u64 + Copy) -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups.lines().filter_map(|line| in_group(line, given)).min().unwrap_or(u64::MAX)
}

/// The same of the groups of a line of `/proc/self/cgroup`, `number:controllers:path`.
fn in_group(line: &str, given: impl Fn(u64, u64) -> u64) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
    let (root, limit, used) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
        "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        _ => return None,
    };
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = Path::new(root).join(path);
    // A group has at most what those above it have.
    let groups = group.ancestors().take_while(|group| group.starts_with(root));
    let all = groups
        .filter_map(|group| Some(given(number(&group.join(limit))?, number(&group.join(used))?)));
    all.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_within_the_limit() {
        assert!(available_bytes() > 0 && available_bytes() <= limit_bytes());
    }
}
