//! What a process may do, and where: its capabilities and its namespaces.

use std::fs::{read_link, read_to_string};

/// The effective capabilities of a process, a bit each, by its `/proc/PID/status` (`proc_pid_status(5)`).
pub fn effective_capabilities(status: &str) -> Option<u64> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(effective.trim(), 16).ok()
}

/// The effective capabilities of this process.
///
/// # Errors
/// `/proc` cannot be read.
pub fn own_capabilities() -> std::io::Result<u64> {
    let status = read_to_string("/proc/self/status")?;
    effective_capabilities(&status).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// Whether a process could do by itself what it has this one do: it has every capability of this one, and
/// shares its user and mount namespaces. A user's number alone says neither: root of a container has number 0. False if
/// this process may not look.
pub fn is_as_privileged(process: u32) -> bool {
    let of = |of: &str, what: &str| format!("/proc/{of}/{what}");
    let process = process.to_string();
    let shares = |namespace: &str| {
        let own = read_link(of("self", namespace));
        matches!((own, read_link(of(&process, namespace))), (Ok(own), Ok(its)) if own == its)
    };
    let capabilities = read_to_string(of(&process, "status"));
    let capabilities = capabilities.ok().and_then(|status| effective_capabilities(&status));
    let has_all = || {
        let (own, its) = (own_capabilities().ok()?, capabilities?);
        Some(own & !its == 0)
    };
    shares("ns/user") && shares("ns/mnt") && has_all().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read() {
        let status = "Name:\tx\nCapPrm:\t0\nCapEff:\t00000000a80425fb\nCapBnd:\t1\n";
        assert_eq!(effective_capabilities(status), Some(0xa804_25fb));
        assert_eq!(effective_capabilities("Name:\tx\n"), None);
    }

    #[test]
    fn a_process_can_do_what_it_does_itself() {
        assert!(is_as_privileged(std::process::id()));
        assert!(!is_as_privileged(u32::MAX));
    }
}
